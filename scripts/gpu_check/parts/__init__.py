"""The parts of the check: each module has `run(setting)`."""
