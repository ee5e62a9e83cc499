#!/usr/bin/env bash
# Shows that the suite catches mistakes: plants each defect of defects.txt into a copy of the tree, builds the tests that it names,
# and demands that every one of them fails. Needs no GPU. `run.sh NAME...` plants those only; --keep keeps the copy.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/plant.py" "$@"
