"""Four queues of a metrics pipeline, live in the terminal, and then a batcher under a burst.

Run it from a checkout: ``make queues``, or ``python -m examples.queue_demo --seconds 12``.
It draws with rich: ``pip install 'batchmill[cli]'``.
"""
