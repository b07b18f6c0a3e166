"""A plugin of pytest that runs each test module in a fresh process with a fresh CUDA context.

The controlling pytest collects, prints, counts and writes as usual. The children send it the reports that pytest makes.
The repository is trusted like in a run of pytest without this plugin. See docs/pytest.md.
"""
