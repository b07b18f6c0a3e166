"""Serve rewards of kernels to NeMo-Gym. It is the `app.py` of a resources server (Python 3.12, `pip install nemo-gym`).

`ng_run` starts it with a configuration such as

    kernels:
      resources_servers:
        kernels:
          entrypoint: app.py
          domain: coding
          backend: triton
          score: speedup

Each row of the dataset has the source of its reference in the column `reference`.
"""

from kqueue.integrations.nemo_gym import KernelResourcesServer

if __name__ == "__main__":
    KernelResourcesServer.run_webserver()
