"""Imported last by the fork server: what it has imported is out of the garbage collector's sight, in children too.

It is a million objects, none of them garbage, and every child would look through all of them several times.
"""

import gc

gc.collect()
gc.freeze()
