"""``AsyncCollector``: a collector in a process of its own, and what lies between the two."""
