# Sourced by rank.sh and engine.sh. source_site: the exports of the site (MEGAPPO_SITE). The site's file may read variables
# that are not set, and its last command may fail. Returns 2 for a file that cannot be read.
source_site() {
    local flags=$-
    [ -n "${MEGAPPO_SITE:-}" ] || return 0
    if [ ! -f "$MEGAPPO_SITE" ] || [ ! -r "$MEGAPPO_SITE" ]; then
        echo "megappo: error: MEGAPPO_SITE '$MEGAPPO_SITE' is no file that can be read on $(hostname); name one, or unset it" >&2
        return 2
    fi
    set +eu
    source "$MEGAPPO_SITE"
    set -u
    [[ $flags != *e* ]] || set -e
}
