"""The check of the engine on a GPU: `scripts/gpu_check.sh` runs it.

    __main__    options, the parts, the exit code
    running     a process for each part, with a limit
    part        what runs in such a process
    findings    what a part found, line by line, so that nothing is lost when it is killed
    report      the JSON file and the tables
    roofline    the device's ceilings, and shares of them
    models      models with random weights, and engines on them
    steps       steps of an engine, timed
    parts/      one module for each part

`running`, `findings` and `report` import no PyTorch.
"""
