"""Commands that work on a whole system: the demo, benchmarks, and the operators' tools.

Beside the modules lie the shell commands of a checkout (`demo`, `test`, `setup-venv`), so no folder here can
have one of those names.
"""
