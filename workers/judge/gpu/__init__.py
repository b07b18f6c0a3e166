"""Devices: what there is, and what a number was taken on."""
