// A test is a function with a name; CHECK says what failed and goes on. Knows nothing of attention.
#pragma once

#include <cstdio>
#include <cstring>
#include <vector>

namespace tests {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& all() {
    static std::vector<Test> tests;
    return tests;
}

inline int& failures() {
    static int count = 0;
    return count;
}

struct Registered {
    Registered(const char* name, void (*run)()) { all().push_back({name, run}); }
};

// Runs the tests whose name contains `part` (null: all). Returns the exit status of the program.
inline int run(const char* part) {
    int count = 0, failed = 0;
    for (const Test& test : all()) {
        if (part != nullptr && std::strstr(test.name, part) == nullptr) continue;
        const int before = failures();
        test.run();
        const bool good = failures() == before;
        std::printf("%s %s\n", good ? "ok    " : "FAILED", test.name);
        std::fflush(stdout);
        ++count;
        failed += !good;
    }
    std::printf("%d tests, %d failed\n", count, failed);
    return failed > 0 || count == 0;
}

}  // namespace tests

#define TEST(name)                                            \
    static void name();                                       \
    static const tests::Registered registered_##name{#name, name}; \
    static void name()

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);          \
            ++tests::failures();                                                           \
        }                                                                                  \
    } while (false)
