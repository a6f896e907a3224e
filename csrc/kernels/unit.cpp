// All kernels for one instruction set. Compiled once for each, with CLEARHEAD_ISA as its name.
#include "backward.h"
#include "decode.h"
#include "forward.h"

#define CLEARHEAD_JOIN_(a, b) a##b
#define CLEARHEAD_JOIN(a, b) CLEARHEAD_JOIN_(a, b)
#define CLEARHEAD_TEXT_(a) #a
#define CLEARHEAD_TEXT(a) CLEARHEAD_TEXT_(a)

namespace clearhead {

const Kernels& CLEARHEAD_JOIN(kernels_, CLEARHEAD_ISA)() {
    static constexpr Kernels table{CLEARHEAD_TEXT(CLEARHEAD_ISA), block_lanes, forward_block_bytes, forward_block,
                                   join_pieces, decodes, decode_bytes, decode_piece_floats, decode_rows, join_decoded,
                                   {W, backward_task_bytes, backward_task}};
    return table;
}

}  // namespace clearhead
