"""Does its work in processes of its own, as sandboxes for code do."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def right(pair):
    return float(pair[0] == pair[1])


def forked(prompt, response, answer, metadata):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(right, [(response, answer)])[0]


def spawned(prompt, response, answer, metadata):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(right, (response, answer)).result()
