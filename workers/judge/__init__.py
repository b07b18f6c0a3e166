"""The trusted judge: it controls the sealed processes, compares outputs, measures times and decides outcomes."""
