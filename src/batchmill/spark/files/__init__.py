"""Files and folders on any file system that Spark can open.

:mod:`.paths` is what the driver does with them, :mod:`.remote` what Spark does for the tasks.
"""
