"""A client that submits kernels as jobs, polls them, and reads the results.

python examples/job_client.py                          # uses the fleet of `kqueue up` on this machine
python examples/job_client.py http://gpu-host:18188    # takes a token from KQUEUE_TOKEN
"""

import sys
import time

import httpx
from eval_client import EXPECTED, KERNELS, PROBLEM, address, authorization, error_message


def main() -> int:
    """Submit the kernels of `eval_client.py` and print their results."""
    url = address()
    headers = authorization(url)
    found = {}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as server:
        jobs = {}
        for sample, (name, kernel) in enumerate(KERNELS.items()):
            job = {"problem_id": 19, "level": 1, "sample_id": sample, "ref_arch_src": PROBLEM, "custom_cuda": kernel}
            answer = server.post("/evaluate", json=job | {"backend": "triton", "timeout": 120}).raise_for_status()
            jobs[name] = answer.json()["job_id"]
        for name, job_id in jobs.items():
            while True:
                job = server.get(f"/job/{job_id}").raise_for_status().json()
                if job["status"] in ("completed", "failed"):
                    break
                time.sleep(1)
            if job["status"] == "failed":
                print(f"{name}: the fleet failed: {job['error']}")
                continue
            result = job["result"]
            found[name] = (result["compiled"], result["correctness"])
            print(f"{name}: {result['metadata']['category']} on {job['device']} in {job['execution_time']:.1f} s")
    return 0 if found == EXPECTED else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.HTTPError as error:
        sys.exit(error_message(error))
