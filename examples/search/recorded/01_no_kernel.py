"""An answer without a kernel."""

print("Here is an idea: fuse the additions.")
