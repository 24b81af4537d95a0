"""What happens once per process, before its first communicator is made."""

import functools
import os

from cgx_ops._core import environment, log, variables


@functools.cache
def check_environment() -> None:
    """Set the logger up; warn of unknown variables; refuse invalid ones.

    Raises:
        InvalidArgument: names the variable, its text and the accepted values.
    """
    log.set_up()
    variables.warn_of_unknown()
    environment.check(os.environ)
