"""The one registry of methods: the command lines, the benchmark, tests and tools read it.

A method is a frozen dataclass of settings whose `rule()` returns a fresh Rule (draft_tree.py). To
add one: a file here, and a line below; --help, graft's bases, the benchmark, the exactness suite
and the GPU's check follow from it.

static      ar, linear, confident, fixed, specinfer: trees whose shape is settled beforehand
sequoia     the static tree that is best for measured chances by rank
dyspec      the nodes of the highest estimated value, whatever shape they make
opttree     the same, until a level adds too little
deagle      beam and deagle: the likeliest nodes of each level, as deep as votes allow
retrieval   recycle and graft: candidates from a table of successors
lookup      what followed the text's own end the last time
auto        both sources, each level and node only while it pays
"""

from draft_tree import DynaTree, Settings
from methods.auto import Auto
from methods.deagle import Beam, Deagle
from methods.dyspec import DySpec
from methods.lookup import Lookup
from methods.opttree import OptTree
from methods.retrieval import Graft, Recycle
from methods.sequoia import Sequoia
from methods.static import Alone, Chain, ConfidentChain, Fixed, SpecInfer

DRAFTING: dict[str, type[Settings]] = {  # by a draft model alone, so graft may go over them
    "linear": Chain,
    "confident": ConfidentChain,
    "fixed": Fixed,
    "specinfer": SpecInfer,
    "sequoia": Sequoia,
    "dynatree": DynaTree,
    "dyspec": DySpec,
    "opttree": OptTree,
    "beam": Beam,
    "deagle": Deagle,
}
METHODS: dict[str, type[Settings]] = {
    "ar": Alone,
    **DRAFTING,
    "recycle": Recycle,
    "lookup": Lookup,
    "graft": Graft,
    "auto": Auto,
}
