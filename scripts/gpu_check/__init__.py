"""Checks the engine on a GPU; `scripts/gpu_check.sh` runs it.

    __main__    options, the parts, the exit code
    running     a process for each part, with a time limit
    part        the main function of such a process
    findings    results of a part, written line by line, so that a killed part loses none
    report      the JSON file and the tables
    roofline    the device's limits, and shares of them
    models      models with random weights, and engines on them
    steps       steps of an engine, timed
    parts/      one module for each part

`running`, `findings` and `report` import no PyTorch.
"""
