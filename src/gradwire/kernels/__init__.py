"""The arithmetic under the codecs: one table of ops, several backends that agree to the byte.

``ops`` names them and states the law they obey, ``reference`` defines what is correct, ``select`` chooses.
"""

from gradwire.kernels.select import available, backends, use

__all__ = ["available", "backends", "use"]
