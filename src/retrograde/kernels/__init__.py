"""Faster bodies for the operators of `retrograde.core.ops`, device by device.

Importing this package registers them. They give the same bits as the plain-torch bodies, so deleting the folder
changes speed only.
"""

from . import cpu as cpu
