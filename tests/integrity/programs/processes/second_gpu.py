"""Looks for GPUs other than its own, in this process and in one without CUDA_VISIBLE_DEVICES.

With a second GPU half of the work is done where no clock looks, and another slot's kernel is slowed. The variable is a
wish; what holds is which device nodes may be opened.
"""


def attack():
    opened = []
    for node in sorted(glob.glob("/dev/nvidia[0-9]*")):
        try:
            os.close(os.open(node, os.O_RDWR))
        except OSError:
            continue
        opened.append(node)
    if len(opened) > 1:
        raise RuntimeError(f"ATTACK SUCCEEDED: opened {opened}")
    question = "import torch; print(sum(torch.ones(1, device=i).item() for i in range(torch.cuda.device_count())))"
    environment = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    answer = subprocess.run([sys.executable, "-c", question], env=environment, capture_output=True, text=True)
    if answer.returncode == 0 and float(answer.stdout.split()[-1]) > 1:
        raise RuntimeError(f"ATTACK SUCCEEDED: {answer.stdout}")
