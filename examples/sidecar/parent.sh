#!/bin/sh
# Runs a model beside a shell script: starts llamasup, asks once, stops it.
#
#     sh parent.sh [MODEL]
#
# --parent-pid, since a script has no other end of its own standard input to hold: llamasup stops when this
# script ends, however it ends. The ready file appears, whole, once requests are served.
set -eu

START_TIMEOUT_S=120 REQUEST_TIMEOUT_S=60

folder=$(mktemp -d)
llamasup=
clean_up() {
    if [ -n "$llamasup" ]; then
        kill "$llamasup" 2>/dev/null || true # SIGTERM: finish what is in flight, then stop
        wait "$llamasup" || true
    fi
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

"${LLAMASUP:-llamasup}" run "${1:-demo}" --port 0 --parent-pid $$ --ready-file "$folder/ready.json" &
llamasup=$!

tenths=0
until [ -e "$folder/ready.json" ]; do
    kill -0 "$llamasup" 2>/dev/null || { echo "llamasup ended (see its messages above)" >&2; exit 1; }
    [ "$tenths" -lt $((START_TIMEOUT_S * 10)) ] || { echo "llamasup was not ready in time" >&2; exit 1; }
    tenths=$((tenths + 1))
    sleep 0.1
done
url=$(sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' "$folder/ready.json")

curl -sS --noproxy '*' --fail-with-body --max-time "$REQUEST_TIMEOUT_S" "$url/completion" \
    -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time", "n_predict": 16}'
echo
