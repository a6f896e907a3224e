// Calls with few query rows: how their keys are cut into pieces, and who joins them.
#pragma once

#include "plan.h"

namespace clearhead {

// Whether a call has so few rows to a key/value head that lanes are better laid along the columns.
bool is_decoding(const Call& call);

Status decode(const Plan& plan);

}  // namespace clearhead
