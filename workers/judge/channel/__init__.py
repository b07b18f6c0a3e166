"""The only connection between the judge and a sealed process: fixed messages and shared buffers.

The judge never unpickles a candidate's data. It parses the data only as numbers and text of bounded length.
"""
