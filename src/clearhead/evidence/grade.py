"""The grade that stands beside every map.

Attention maps are not proof: they may disagree with gradients and leave-one-out, and other weights can give
the same prediction (Jain & Wallace 2019); what they are worth has to be tested (Wiegreffe & Pinter 2019).
"""

#: The grade of a map that has not been tested on this model and input.
UNTESTED = "shows where the head looked; not shown to be why the model answered"

#: Where the grade is explained.
DOCS = "docs/evidence.md"
