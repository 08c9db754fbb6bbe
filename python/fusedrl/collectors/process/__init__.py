"""``AsyncCollector``: a collector in a worker process, and the communication with it."""
