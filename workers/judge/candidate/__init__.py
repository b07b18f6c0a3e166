"""The untrusted side of the judge: the sealed process that loads and runs a candidate's kernel.

Nothing in this process is trusted after a candidate was loaded. The process holds no credentials, no reference outputs,
no input seeds and no clock that counts. Only the judge decides the verdict.
"""
