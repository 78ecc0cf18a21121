"""The one registry of methods: the command lines, the benchmark, tests and tools read it.

A method is a frozen dataclass of settings whose `make_rule()` returns a Rule (draft_tree.py). To
add one: a file here, and a line in drafting.py, or below if it needs more than a draft model;
--help, graft's bases, the benchmark, the exactness suite and the GPU's check follow from it.

static      ar, linear, confident, fixed, specinfer: as many children as a depth allows
sequoia     the static tree that is best for measured chances by rank
dyspec      the nodes of the highest estimated value, whatever shape they make
opttree     the same, until a level adds too little
deagle      beam and deagle: the likeliest nodes of each level, as deep as votes allow
drafting    all of these but ar, and dynatree: what needs nothing but a draft model
ngrams      what came after a few tokens the last time, for lookup and auto
retrieval   recycle and graft: candidates from a table of successors
lookup      what followed the text's own end the last time
auto        both sources, each level and node only while it pays
drawn       candidates drawn from the draft's distribution, and the check of what is cut
acceptances  by token, by block and by traversal: what is kept of drawn candidates
calibration  acceptance probabilities, learned online: a wrapper of the drafter
observing   targets that show what they compute: to a rule, or to a drafter
compose     all parts of a method around the core's loop
rules       what rules share: attributes, the wrapper, trees with retrieved rows, the cut
costs       what an iteration takes, fitted as times come in, and what is worth its time
cost_gates  gates around a rule: rows and levels that are worth their time
shared_settings  calibration and cost gates, as settings of many rules
settings    settings that are words, and settings read from words
"""

from draft_tree import Settings
from methods.auto import Auto
from methods.drafting import DRAFTING
from methods.lookup import Lookup
from methods.retrieval import Graft, Recycle
from methods.static import Alone

METHODS: dict[str, type[Settings]] = {
    "ar": Alone,
    **DRAFTING,
    "recycle": Recycle,
    "lookup": Lookup,
    "graft": Graft,
    "auto": Auto,
}
