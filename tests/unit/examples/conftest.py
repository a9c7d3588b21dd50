"""What torch imports only as an optimizer is made: once before the tests' processes are forked, not in each of them."""

import torch._dynamo  # noqa: F401
