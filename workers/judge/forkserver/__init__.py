"""The fork server, which is the trusted parent of every sealed process, and the judge's handles on both."""
