"""Files and folders on any file system that Spark can open, and the state that is kept in them.

:mod:`.paths` is what the driver does with them, :mod:`.remote` what Spark does for the tasks.
:mod:`.state` are the files that one batch keeps for the next, :mod:`.statefiles` what is in them.
:mod:`.quarantine` keeps what cannot be used.
"""
