"""Adapters for code that expects another evaluator's interface. They translate and do not judge."""
