"""``AsyncCollector``: a collector in a worker process, and its communication."""
