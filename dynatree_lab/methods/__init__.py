"""The registry of methods, which the command lines, the benchmark, tests and tools read.

A method is a frozen dataclass of settings whose `make_rule()` returns a Rule (draft_tree.py). It
may also have:

make_drafter(draft)  returns a new dynatree.Drafter for one text, in place of the plain draft model.
                     draft: the draft model's run, or None
needs_draft = False  the drafter needs no draft model
make_accept()        returns a new verify.Acceptance for one greedy text

A file of the user's adds one to METHODS (--load). To add one to the project, write a file here.
Then add a line to drafting.py, or to METHODS below if the method needs more than a draft model.
--list-methods, graft's bases, the benchmark, the exactness suite and the GPU check include it from
then on.

static      ar, linear, confident, fixed, specinfer: widths are fixed before decoding
sequoia     the tree shape that is best for measured acceptance probabilities by rank
dyspec      the nodes with the highest estimated values, in any shape
opttree     the likeliest nodes, drafted until a level adds too little
deagle      beam and deagle: the likeliest nodes of each level, to a fixed depth or by votes
drafting    the methods that need only a draft model: all above but ar, and dynatree
ngrams      an index from the last tokens of a context to a value, for lookup and auto
retrieval   recycle and graft: candidates from a table of successors
lookup      candidates copied from the text itself
auto        draft and n-grams, each level and node only while it pays
drawn       candidates drawn from the draft's distribution
acceptances  of sampled text with drawn candidates: by token and by traversal
calibration  acceptance probabilities, learned online: a wrapper of the drafter
eagle       a trained head over the target's hidden states as the draft (EAGLE)
rules       base classes of rules, their facts, the rule wrapper, trees with retrieved rows
method      what a generation asks of a method: its facts, with calibration and cost gates
overflow    rows that overflow, without which a text goes on
costs       a linear model of an iteration's time, and whether drafting pays
cost_gates  gates around any rule: draft and verify only what pays
settings    settings whose values are words, and the parsing of NAME=VALUE
"""

from draft_tree import Settings
from dynatree_lab.methods.auto import Auto
from dynatree_lab.methods.drafting import DRAFTING
from dynatree_lab.methods.lookup import Lookup
from dynatree_lab.methods.retrieval import Graft, Recycle
from dynatree_lab.methods.static import PaddedAutoregressive

METHODS: dict[str, type[Settings]] = {
    "ar": PaddedAutoregressive,
    **DRAFTING,
    "recycle": Recycle,
    "lookup": Lookup,
    "graft": Graft,
    "auto": Auto,
}
PROJECT_METHODS = tuple(METHODS)  # without those that users add
