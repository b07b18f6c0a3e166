"""The untrusted side: the process that loads a kernel and runs it when told.

Nothing here is trusted once a candidate has been loaded into it. It holds no credential, no reference
output, no seed of an input, no clock that counts, and no way to a verdict but through the judge.
"""
