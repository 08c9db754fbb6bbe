"""Names that other packages still import from here."""

from fusedrl.channel.rendezvous import ranks_of_shards
from fusedrl.channel.tensors import Weight as Place
from fusedrl.channel.tensors import refuse_other_state
from fusedrl.channel.tensors import weights_in as module_places
from fusedrl.channel.tensors import weights_of as places_of

__all__ = ["Place", "module_places", "places_of", "ranks_of_shards", "refuse_other_state"]
