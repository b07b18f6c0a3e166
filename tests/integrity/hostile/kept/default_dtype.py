"""Leaves torch set otherwise than it was: default dtype, threads, gradients, seeds.

Its model is constructed anew under the same settings in each evaluation, and its answers are the same. It passes twice.
"""

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
