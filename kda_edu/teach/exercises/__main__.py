"""`python -m kda_edu.teach.exercises [name]`: list the exercises, or print one stub."""

import sys

from . import exercise_names, get, stub

if len(sys.argv) > 1:
    print(stub(sys.argv[1]))
else:
    for name in exercise_names():
        print("*" * get(name).stars, name, get(name).title, sep="\t")
