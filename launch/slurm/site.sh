# rank.sh and engine.sh source this file. source_site sources the file in MEGAPPO_SITE, which may read unset variables and
# whose last command may fail. Returns 2 if the file cannot be read.
source_site() {
    local flags=$-
    [ -n "${MEGAPPO_SITE:-}" ] || return 0
    if [ ! -f "$MEGAPPO_SITE" ] || [ ! -r "$MEGAPPO_SITE" ]; then
        echo "megappo: error: MEGAPPO_SITE is '$MEGAPPO_SITE', must be a readable file on $(hostname); name one, or unset it" >&2
        return 2
    fi
    set +eu
    source "$MEGAPPO_SITE"
    set -u
    [[ $flags != *e* ]] || set -e
}
