"""Replace this process by another program: the arguments are its path and its arguments."""

import os
import sys

os.execv(sys.argv[1], sys.argv[1:])
