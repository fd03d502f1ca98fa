"""How threads share units of work (`csrc/common/units.h`), compiled by the host compiler: every unit once."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "common/units.h"

// Counts how often each unit is taken; thread 0 is slow. Prints "bad" lines, and how many runs helped others.
int main(int, char** arguments) {
    const int64_t count = std::atoll(arguments[1]), threads = std::atoll(arguments[2]);
    const int64_t at_once = std::atoll(arguments[3]);
    int64_t helped = 0;
    for (int round = 0; round < 50; round++) {
        std::vector<ptq::Share> shares(threads);
        std::vector<std::atomic<int>> taken(count);
        std::atomic<int64_t> helps{0}, begun{0};
        for (int64_t i = 0; i < threads; i++) shares[i].set(count * i / threads, count * (i + 1) / threads);
        const auto work = [&](int64_t first, int64_t last, bool slow) {
            if (first < 0 || first >= last || last > count) std::puts("bad run");
            for (int64_t unit = first; unit < last; unit++) taken[unit]++;
            if (slow) std::this_thread::sleep_for(std::chrono::microseconds(100));
        };
        std::vector<std::thread> all;
        for (int64_t self = 0; self < threads; self++)
            all.emplace_back([&, self] {
                for (begun++; begun < threads;) std::this_thread::yield();
                bool own = true;  // until a run is of another share
                const auto counted = [&](int64_t first, int64_t last) {
                    own = own && count * self / threads <= first && last <= count * (self + 1) / threads;
                    if (!own) helps++;
                    work(first, last, self == 0 && own);
                };
                ptq::work_through(shares.data(), threads, self, self + 1, at_once, counted);
            });
        for (auto& thread : all) thread.join();
        for (const auto& times : taken)
            if (times != 1) std::puts("bad unit");
        helped += helps;
        for (int64_t i = 0; i < threads; i++) shares[i].set(count * i / threads, count * (i + 1) / threads);
        int64_t next = 0;  // all in one thread: in order, and nothing is left to help with
        ptq::work_through(shares.data(), threads, 0, threads, at_once, [&](int64_t first, int64_t last) {
            if (first != next) std::puts("bad order");
            next = last;
        });
        if (next != count) std::puts("bad end");
    }
    std::printf("%lld\n", static_cast<long long>(helped));
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("units")
    (folder / "units.cpp").write_text(SOURCE)
    headers = Path(__file__).parents[1] / "csrc"
    command = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{headers}", "units.cpp", "-o", "units"]
    subprocess.run([*command, "-pthread"], cwd=folder, check=True)
    return folder / "units"


@pytest.mark.parametrize(
    ("count", "threads", "at_once", "helps"),
    [(1, 2, 4, False), (500, 1, 7, False), (64, 2, 4, True), (1000, 3, 4, True), (37, 8, 1, True)],
)
def test_every_unit_is_taken_once(program: Path, count: int, threads: int, at_once: int, helps: bool) -> None:
    found = subprocess.run([program, *map(str, (count, threads, at_once))], capture_output=True, text=True, check=True)
    assert (int(found.stdout) > 0) == helps
