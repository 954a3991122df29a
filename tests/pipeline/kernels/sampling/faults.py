"""Faults of the kernel, and the cases that must find each: see `test_faults.py`."""

from pipeline.kernels.sampling.cases import QUICK

FAULTS = {
    "no barrier before the highest score is read": (
        "is_number = !__syncthreads_or(!is_number);",
        "is_number = true;",
    ),
    "bins are counted before they are empty": (
        "shared->bins[bin] = 0;\n    __syncthreads();",
        "shared->bins[bin] = 0;",
    ),
    "bins are read before they are counted": (
        "amount);\n    }\n    __syncthreads();",
        "amount);\n    }",
    ),
    "the segments' weights are read too early": (
        "row.ties[segment] = ties;\n  }\n  __syncthreads();",
        "row.ties[segment] = ties;\n  }",
    ),
    "a barrier that one warp alone comes to": (
        "if (lane == 0) row.shared->total = total;",
        "if (lane == 0) row.shared->total = total;\n    __syncthreads();",
    ),
    "words beyond the last are read": ("if (word >= row.num_words) continue;", ""),
    "the last segment is left out": (
        "(p.num_words + SEGMENT - 1) / SEGMENT",
        "p.num_words / SEGMENT",
    ),
    "of equally likely words the last is taken": (
        "(their_highest == highest && their_first < first)",
        "(their_highest == highest && their_first > first)",
    ),
    "ties are counted again in each segment": ("const int up_to = before + ", "const int up_to = "),
    "one tie too many": (
        "(wanted - above + of_tie - 1) / of_tie",
        "(wanted - above + of_tie - 1) / of_tie + 1",
    ),
    "ties of the drawn segment have no order": (
        "__popc(tied & ((1u << lane) - 1))",
        "__popc(tied & ~1u)",
    ),
    "the bits found so far are not heeded": (
        "d >> (shift + 8) == found >> (shift + 8)",
        "true",
    ),
    "what comes before a digit is forgotten": (
        "u64 sum = above + sum_so_far(own);",
        "u64 sum = sum_so_far(own);",
    ),
    "the nucleus is of all words, not of those that top-k left": (
        "if (p.top_k > 0) total = fill(row, cut);",
        "",
    ),
    "words count by number where they shall by weight": ("by_weight ? weight(d) : 1", "1"),
    "the least share is not heeded": ("cut.least = p.min_p;", ""),
    "the log-probability is that of what was kept": (
        "const u64 total = whole ? all : fill(row, cut);",
        "const u64 total = whole ? all : fill(row, cut); const_cast<u64&>(all) = total;",
    ),
    "the log-probability is the likeliest word's": ("score(row, word) - row.highest)", "0.f)"),
    "the temperature is left out": ("? logit / row.temperature : logit", "? logit : logit"),
    "the position is left out of the draw": ("p.positions + blockIdx.x", "p.keys + blockIdx.x"),
    "the point of a share of the words, not of the weight": (
        "share * static_cast<double>(total)",
        "share * static_cast<double>(total) * 0.9",
    ),
    "all rows are the first": ("blockIdx.x * p.row_stride", "0"),
    "shared memory is left": (
        "reinterpret_cast<int*>(row.weights + row.num_segments)",
        "reinterpret_cast<int*>(row.weights + row.num_segments + 1)",
    ),
    "arrays of shared memory overlap": (
        "reinterpret_cast<int*>(row.weights + row.num_segments)",
        "reinterpret_cast<int*>(row.weights + row.num_segments - 1)",
    ),
}

SEEN_BY_SELF_TEST = ("state ^ (state >> 27)", "state ^ (state >> 26)")
"""Which a GPU that is not the one of the tests might have."""

CASES = QUICK
