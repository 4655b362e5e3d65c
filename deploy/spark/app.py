"""The application that Spark is given: the ``batchmill`` command, with the application's arguments.

A file of its own, in a folder of its own: Python looks for modules beside the file it is given.
"""

from batchmill.cli import main

raise SystemExit(main())
