"""The stages of one evaluation. They run in the judge, without foreign code."""
