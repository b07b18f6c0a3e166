"""Serve rewards of kernels to NeMo-Gym (Python 3.12, `pip install nemo-gym`).

It is the file resources_servers/kernels/app.py. The file requirements.txt next to it names kqueue, and
configs/kernels.yaml has the configuration. `gym env start --config resources_servers/kernels/configs/kernels.yaml`
starts it.

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
