"""The methods that need only a draft model, so that graft can use each of them as its base."""

from draft_tree import DynaTree, Settings
from dynatree_lab.methods.deagle import Beam, Deagle
from dynatree_lab.methods.dyspec import DySpec
from dynatree_lab.methods.opttree import OptTree
from dynatree_lab.methods.sequoia import Sequoia
from dynatree_lab.methods.static import Chain, ConfidentChain, Fixed, SpecInfer

DRAFTING: dict[str, type[Settings]] = {
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
