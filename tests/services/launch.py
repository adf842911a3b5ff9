"""The scheduler as its command runs it, engine process and all, over the pseudo-model: `python -m tests.services.launch
FOLDER STEP_S [flags of lockstep-scheduler]`.
"""

import faulthandler
import functools
import logging
import signal
import sys

from scheduler_svc import app, logs
from scheduler_svc.engine_process import EngineStart
from tests.services.pseudo import Pseudo


def main():
    faulthandler.register(signal.SIGUSR1)  # stacks on stderr, for whoever wonders what it waits for
    folder, step_s, *flags = sys.argv[1:]
    config, options = app.configure(["--workers", "pseudo:1", *flags])
    logs.set_up("lockstep-scheduler", options.log_format, getattr(logging, options.log_level.upper()))
    make_executor = functools.partial(Pseudo, folder, step_s=float(step_s))
    raise SystemExit(app.run(config, EngineStart(config.engine, make_executor)))


if __name__ == "__main__":
    main()
