"""The methods that need nothing but a draft model, so that graft may go over any of them."""

from draft_tree import DynaTree, Settings
from methods.deagle import Beam, Deagle
from methods.dyspec import DySpec
from methods.opttree import OptTree
from methods.sequoia import Sequoia
from methods.static import Chain, ConfidentChain, Fixed, SpecInfer

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
