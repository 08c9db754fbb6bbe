"""Names that other packages still import from here."""

from fusedrl.channel.rendezvous import ranks_of_shards as ranks_of_shards
from fusedrl.channel.tensors import Weight as Place  # noqa: F401
from fusedrl.channel.tensors import refuse_other_state as refuse_other_state
from fusedrl.channel.tensors import weights_in as module_places  # noqa: F401
from fusedrl.channel.tensors import weights_of as places_of  # noqa: F401
