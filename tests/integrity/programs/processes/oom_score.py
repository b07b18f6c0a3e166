"""Makes itself the last to be killed when memory runs out, and its keepers the first.

Then a memory bomb takes the judge, which is the fleet's failure. Lowering the score needs a capability that candidates
do not have.
"""


def attack():
    for pid, score in [("self", "-1000"), *((str(pid), "1000") for pid in keepers())]:
        try:
            with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                file.write(score)
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: {pid} now has {score}")
