"""Check the environment once per process, before its first communicator is created."""

import functools
import os

from cgx_ops._core import environment, log, variables


@functools.cache
def check_environment() -> None:
    """Set up the logger, warn about unknown variables, and refuse invalid ones.

    Raises:
        InvalidArgument: A variable is not valid. The message has its name, its text and the
            accepted values.
    """
    log.set_up()
    variables.warn_of_unknown()
    environment.check(os.environ)
