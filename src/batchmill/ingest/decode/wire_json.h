/* Decodes OTLP trace requests in JSON; included by wire.c.
 *
 * As with protobuf, whatever is unusual is left to the reference: an odd span alone, anything else
 * with the whole request. A body that is not valid JSON, has half of a surrogate pair, or has more
 * values or levels than the limits allow, is unusual. Every read is bounded by the end of the body,
 * which is valid UTF-8.
 */

typedef struct {
    const u8 *at, *end;
    int64_t values; /* brackets and commas that may still come */
    int64_t depth;  /* levels that may still be opened */
} Json;

/* A string between its quotes, or a number. */
typedef struct {
    const u8 *data;
    size_t size;
    int escaped; /* a string has escapes */
    int whole;   /* a number has neither fraction nor exponent */
} Token;

enum { DEEPEST = 64, LONGEST_NUMBER = 400 }; /* Python refuses numbers of some thousand digits */

/* ---- values ---- */

static u8 peek(Json *json)
{
    while (json->at < json->end &&
           (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
        json->at++;
    return json->at < json->end ? *json->at : 0;
}

static int hex_digit(u8 c)
{
    if (c >= '0' && c <= '9') return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The number of an escape's four digits; -1 if they are not. */
static int hex_four(const u8 *at, const u8 *end)
{
    int value = 0, digit, i;
    if (end - at < 4) return -1;
    for (i = 0; i < 4; i++) {
        if ((digit = hex_digit(at[i])) < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* The size of the escape at a backslash; 0 if it is invalid, or half of a surrogate pair. */
static size_t escape_size(const u8 *at, const u8 *end)
{
    int first, second;
    if (end - at < 2) return 0;
    if (at[1] != 'u') return at[1] && strchr("\"\\/bfnrt", at[1]) ? 2 : 0;
    first = hex_four(at + 2, end);
    if (first < 0 || (first >= 0xdc00 && first < 0xe000)) return 0;
    if (first < 0xd800 || first >= 0xe000) return 6;
    if (end - at < 12 || at[6] != '\\' || at[7] != 'u') return 0;
    second = hex_four(at + 8, end);
    return second >= 0xdc00 && second < 0xe000 ? 12 : 0;
}

#define EACH_BYTE(byte) (0x0101010101010101ULL * (byte))
#define BELOW(word, byte) (((word) - EACH_BYTE(byte)) & ~(word) & EACH_BYTE(0x80))

static int read_text(Json *json, Token *token)
{
    const u8 *at, *end = json->end;
    size_t size;
    if (peek(json) != '"') return 0;
    at = token->data = json->at + 1;
    token->escaped = 0;
    for (;;) {
        while (end - at >= 8) {
            uint64_t word, stop;
            memcpy(&word, at, 8);
            stop = BELOW(word, 0x20) | BELOW(word ^ EACH_BYTE('"'), 1) |
                   BELOW(word ^ EACH_BYTE('\\'), 1);
            if (stop) {
                at += __builtin_ctzll(stop) >> 3; /* the first one is never a false one */
                break;
            }
            at += 8;
        }
        while (at < end && *at >= 0x20 && *at != '"' && *at != '\\') at++;
        if (at == end || *at < 0x20) return 0;
        if (*at == '"') break;
        if (!(size = escape_size(at, end))) return 0;
        token->escaped = 1;
        at += size;
    }
    token->size = (size_t)(at - token->data);
    json->at = at + 1;
    return 1;
}

/* Replace the escapes of a string; the result is in the reader's scratch. 0 without memory. */
static int unescape(Reader *reader, Token *token)
{
    const u8 *at = token->data, *end = at + token->size;
    Bytes *scratch = &reader->scratch;
    u8 *out;
    if (!token->escaped) return 1;
    scratch->length = 0;
    if (!RESERVE(scratch, token->size)) return 0; /* an escape is longer than what it stands for */
    out = scratch->data;
    while (at < end) {
        static const char NAMES[] = "bfnrt", CHARACTERS[] = "\b\f\n\r\t";
        const char *name;
        unsigned c;
        if (*at != '\\') {
            *out++ = *at++;
            continue;
        }
        if (at[1] != 'u') {
            name = strchr(NAMES, at[1]);
            *out++ = name ? (u8)CHARACTERS[name - NAMES] : at[1];
            at += 2;
            continue;
        }
        c = (unsigned)hex_four(at + 2, end);
        at += 6;
        if (c >= 0xd800 && c < 0xe000) {
            c = 0x10000 + ((c - 0xd800) << 10) + ((unsigned)hex_four(at + 2, end) - 0xdc00);
            at += 6;
        }
        if (c < 0x80) {
            *out++ = (u8)c;
        } else {
            if (c < 0x800) {
                *out++ = (u8)(0xc0 | c >> 6);
            } else {
                if (c < 0x10000) {
                    *out++ = (u8)(0xe0 | c >> 12);
                } else {
                    *out++ = (u8)(0xf0 | c >> 18);
                    *out++ = (u8)(0x80 | (c >> 12 & 63));
                }
                *out++ = (u8)(0x80 | (c >> 6 & 63));
            }
            *out++ = (u8)(0x80 | (c & 63));
        }
    }
    token->data = scratch->data;
    token->size = (size_t)(out - scratch->data);
    return 1;
}

static const u8 *digits_end(const u8 *at, const u8 *end)
{
    while (at < end && *at >= '0' && *at <= '9') at++;
    return at;
}

static int read_number(Json *json, Token *token)
{
    const u8 *end = json->end, *at, *next;
    peek(json);
    at = token->data = json->at;
    if (at < end && *at == '-') at++;
    next = digits_end(at, end);
    if (next == at || (*at == '0' && next - at > 1)) return 0;
    at = next;
    token->whole = 1;
    if (at < end && *at == '.') {
        token->whole = 0;
        next = digits_end(at + 1, end);
        if (next == at + 1) return 0;
        at = next;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        token->whole = 0;
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        next = digits_end(at, end);
        if (next == at) return 0;
        at = next;
    }
    token->size = (size_t)(at - token->data);
    json->at = at;
    return token->size <= LONGEST_NUMBER;
}

static int read_word(Json *json, const char *word)
{
    size_t size = strlen(word);
    peek(json);
    if ((size_t)(json->end - json->at) < size || memcmp(json->at, word, size) != 0) return 0;
    json->at += size;
    return 1;
}

static int open_bracket(Json *json, u8 bracket)
{
    if (peek(json) != bracket || json->values-- <= 0 || json->depth-- <= 0) return 0;
    json->at++;
    return 1;
}

enum { MORE = 1, END = 0, INVALID = -1 };

/* Go to the next item of an array, or member of an object, that `bracket` ends. */
static int next_item(Json *json, u8 bracket, int *first)
{
    u8 c = peek(json);
    if (c == bracket) {
        json->at++;
        json->depth++;
        return END;
    }
    if (!*first) {
        if (c != ',' || json->values-- <= 0) return INVALID;
        json->at++;
        peek(json);
    }
    *first = 0;
    return MORE;
}

static int read_colon(Json *json)
{
    if (peek(json) != ':') return 0;
    json->at++;
    return 1;
}

/* Read any value; 0 if it is invalid, or over a limit. */
static int skip_value(Json *json)
{
    Token token;
    u8 c = peek(json), close = c == '{' ? '}' : ']';
    int first = 1, more;
    switch (c) {
    case '"':
        return read_text(json, &token);
    case '{':
    case '[':
        if (!open_bracket(json, c)) return 0;
        while ((more = next_item(json, close, &first)) == MORE) {
            if (c == '{' && (!read_text(json, &token) || !read_colon(json))) return 0;
            if (!skip_value(json)) return 0;
        }
        return more == END;
    case 't':
        return read_word(json, "true");
    case 'f':
        return read_word(json, "false");
    case 'n':
        return read_word(json, "null");
    }
    return read_number(json, &token);
}

/* ---- members of objects ---- */

typedef struct {
    const char *text;
    size_t size;
} Name;

#define NAME(text) {text, sizeof text - 1}
#define NO_NAME {NULL, 0}

static int index_of(const Name *names, const Token *token)
{
    int i;
    for (i = 0; names[i].text; i++)
        if (names[i].size == token->size && !memcmp(names[i].text, token->data, token->size))
            return i;
    return -1;
}

enum { LAST = -1, STRANGE = -2 };

/* Go to the next member with one of `names` that is not null: its index. LAST at the end of the
 * object. STRANGE if it is invalid, or has one of the names twice or perhaps with escapes. */
static int next_member(Json *json, const Name *names, unsigned *seen)
{
    Token name;
    int first = !*seen, index, more;
    while ((more = next_item(json, '}', &first)) == MORE) {
        *seen |= 1;
        if (!read_text(json, &name) || name.escaped || !read_colon(json)) return STRANGE;
        index = index_of(names, &name);
        if (index < 0) {
            if (!skip_value(json)) return STRANGE;
            continue;
        }
        if (*seen & 2u << index) return STRANGE;
        *seen |= 2u << index;
        if (peek(json) != 'n') return index;
        if (!read_word(json, "null")) return STRANGE;
    }
    return more == END ? LAST : STRANGE;
}

/* A whole number, as a number or as text; 0 if it is not, or has more than 64 bits. */
static int read_whole(Json *json, uint64_t *value, int *negative)
{
    Token token;
    const u8 *at, *end;
    if (peek(json) == '"') {
        if (!read_text(json, &token)) return 0;
    } else if (!read_number(json, &token) || !token.whole) {
        return 0;
    }
    at = token.data;
    end = at + token.size;
    *negative = at < end && *at == '-';
    at += *negative;
    if (at == end || end - at > 20) return 0;
    for (*value = 0; at < end; at++) {
        unsigned digit = (unsigned)*at - '0';
        if (digit > 9 || *value > (UINT64_MAX - digit) / 10) return 0;
        *value = *value * 10 + digit;
    }
    return 1;
}

static int read_natural(Json *json, uint64_t *value)
{
    int negative;
    return read_whole(json, value, &negative) && !negative;
}

/* The number of an enum: as such, or by name. */
static int read_enum(Json *json, const Name *names, uint64_t *value)
{
    Token token;
    int index;
    if (peek(json) != '"') return read_natural(json, value);
    if (!read_text(json, &token) || (index = index_of(names, &token)) < 0) return 0;
    *value = (uint64_t)index;
    return 1;
}

/* An id of `most` bytes in hex; an empty one has none. */
static int read_id(Json *json, u8 *id, size_t most, size_t *size)
{
    Token token;
    size_t i;
    if (!read_text(json, &token) || token.escaped) return 0;
    if (token.size && token.size != 2 * most) return 0;
    *size = token.size / 2;
    for (i = 0; i < *size; i++) {
        int high = hex_digit(token.data[2 * i]), low = hex_digit(token.data[2 * i + 1]);
        if (high < 0 || low < 0) return 0;
        id[i] = (u8)(high << 4 | low);
    }
    return 1;
}

/* ---- attributes ---- */

/* Write a double, given as a number, as Python does; 0 if this cannot tell. */
static size_t write_number(const Token *token, char *out, size_t room)
{
    char copy[40], *end;
    double value;
    if (token->size >= sizeof copy) return 0;
    /* To Python a number without a point is an int, which has no -0. */
    if (token->whole && token->size == 2 && !memcmp(token->data, "-0", 2)) return 0;
    memcpy(copy, token->data, token->size);
    copy[token->size] = 0;
    value = strtod(copy, &end);
    if (end != copy + token->size) return 0; /* another locale */
    return write_double(value, out, room);
}

static const Name VALUE_NAMES[] = {NAME("stringValue"), NAME("intValue"), NAME("boolValue"),
                                   NAME("doubleValue"), NAME("bytesValue"), NAME("arrayValue"),
                                   NAME("kvlistValue"), NO_NAME};

/* Read a value as text, which may be in `buffer` or in the reader's scratch. */
static int json_value(Reader *reader, Json *json, char *buffer, size_t room, Token *text)
{
    unsigned seen = 0;
    uint64_t number;
    int negative;
    if (!open_bracket(json, '{')) return ODD;
    text->data = (const u8 *)buffer;
    switch (next_member(json, VALUE_NAMES, &seen)) {
    case 0:
        if (!read_text(json, text)) return ODD;
        if (!unescape(reader, text)) return failed(reader, NO_MEMORY);
        break;
    case 1:
        if (!read_whole(json, &number, &negative)) return ODD;
        if (number > (uint64_t)INT64_MAX) return ODD;
        text->size = write_int(negative ? -(int64_t)number : (int64_t)number, buffer);
        break;
    case 2:
        text->size = (size_t)snprintf(buffer, room, peek(json) == 't' ? "true" : "false");
        if (!read_word(json, buffer)) return ODD;
        break;
    case 3: {
        Token token;
        if (!read_number(json, &token)) return ODD;
        if (!(text->size = write_number(&token, buffer, room))) return ODD;
        break;
    }
    default:
        return ODD;
    }
    return next_member(json, VALUE_NAMES, &seen) == LAST ? PLAIN : ODD;
}

static const Name ATTRIBUTE_NAMES[] = {NAME("key"), NAME("value"), NO_NAME};

/* Read the attribute at `place` in the list of a span. */
static int json_attribute(Reader *reader, Json *json, size_t row, size_t first_rest, size_t place)
{
    const Limits *limits = reader->limits;
    Guess *guess = &reader->guesses[place % GUESSES];
    Token key = {0}, text = {0};
    char buffer[64];
    unsigned seen = 0;
    int index, outcome, has_value = 0;
    if (!open_bracket(json, '{')) return ODD;
    while ((index = next_member(json, ATTRIBUTE_NAMES, &seen)) >= 0) {
        if (index == 0) {
            if (!read_text(json, &key) || key.escaped) return ODD;
        } else {
            outcome = json_value(reader, json, buffer, sizeof buffer, &text);
            if (outcome != PLAIN) return outcome;
            has_value = 1;
        }
    }
    if (index != LAST || !has_value || (int64_t)text.size > limits->max_attribute_length)
        return ODD;
    if (!is_key(guess, key.data, key.size)) {
        if (!key.size || (int64_t)key.size > limits->max_key_length) return ODD;
        if (!find_key(reader, guess, key.data, key.size)) return failed(reader, NO_MEMORY);
    }
    return put_attribute(reader, row, first_rest, guess, text.data, text.size);
}

static int json_attributes(Reader *reader, Json *json, int64_t *count)
{
    size_t row = reader->spans->times.length, first_rest = reader->spans->rest_keys.length;
    int first = 1, more, outcome;
    if (!open_bracket(json, '[')) return ODD;
    while ((more = next_item(json, ']', &first)) == MORE) {
        if (++*count > reader->limits->max_attributes) return ODD;
        outcome = json_attribute(reader, json, row, first_rest, (size_t)*count - 1);
        if (outcome != PLAIN) return outcome;
    }
    return more == END ? PLAIN : ODD;
}

/* ---- spans ---- */

static const Name KIND_NAMES[] = {
    NAME("SPAN_KIND_UNSPECIFIED"), NAME("SPAN_KIND_INTERNAL"), NAME("SPAN_KIND_SERVER"),
    NAME("SPAN_KIND_CLIENT"), NAME("SPAN_KIND_PRODUCER"), NAME("SPAN_KIND_CONSUMER"), NO_NAME};

static const Name CODE_NAMES[] = {NAME("STATUS_CODE_UNSET"), NAME("STATUS_CODE_OK"),
                                  NAME("STATUS_CODE_ERROR"), NO_NAME};

static int json_status(Json *json, uint64_t *code)
{
    static const Name NAMES[] = {NAME("code"), NAME("message"), NO_NAME};
    Token message = {0};
    unsigned seen = 0;
    int index;
    if (!open_bracket(json, '{')) return 0;
    while ((index = next_member(json, NAMES, &seen)) >= 0)
        if (!(index == 0 ? read_enum(json, CODE_NAMES, code)
                         : read_text(json, &message) && !message.size))
            return 0; /* a message is for the reference */
    return index == LAST;
}

/* Whether a list has nothing in it: events are for the reference. */
static int json_nothing(Json *json)
{
    int first = 1;
    return open_bracket(json, '[') && next_item(json, ']', &first) == END;
}

static const Name SPAN_NAMES[] = {
    NAME("traceId"), NAME("spanId"), NAME("parentSpanId"), NAME("name"), NAME("kind"),
    NAME("startTimeUnixNano"), NAME("endTimeUnixNano"), NAME("attributes"), NAME("status"),
    NAME("events"), NO_NAME};

static int json_span(Reader *reader, Json *json, int32_t group)
{
    u8 trace[16], own[8], parent[8];
    Span span = {.trace = trace, .own = own, .parent = parent};
    Token name = {0};
    int64_t attributes = 0;
    unsigned seen = 0;
    int index, outcome, valid = 1;
    if (!open_bracket(json, '{')) return ODD;
    while (valid && (index = next_member(json, SPAN_NAMES, &seen)) != LAST) {
        switch (index) {
        case 0: valid = read_id(json, trace, 16, &span.trace_size); break;
        case 1: valid = read_id(json, own, 8, &span.own_size); break;
        case 2: valid = read_id(json, parent, 8, &span.parent_size); break;
        case 3: valid = read_text(json, &name); break;
        case 4: valid = read_enum(json, KIND_NAMES, &span.kind); break;
        case 5: valid = read_natural(json, &span.start); break;
        case 6: valid = read_natural(json, &span.end); break;
        case 7:
            outcome = json_attributes(reader, json, &attributes);
            if (outcome != PLAIN) return outcome;
            break;
        case 8: valid = json_status(json, &span.code); break;
        case 9: valid = json_nothing(json); break;
        default: valid = 0;
        }
    }
    if (!valid) return ODD;
    if (!unescape(reader, &name)) return failed(reader, NO_MEMORY);
    span.name = name.data;
    span.name_size = name.size;
    return add_span(reader, group, &span, attributes);
}

static int json_spans(Reader *reader, Json *json, int32_t group)
{
    Spans *spans = reader->spans;
    const Replacement *other;
    Json before;
    int first = 1, more, outcome;
    if (!open_bracket(json, '[')) return GIVE_UP;
    while ((more = next_item(json, ']', &first)) == MORE) {
        if (++spans->spans > reader->limits->max_spans) return GIVE_UP;
        before = *json;
        if ((other = replacement_of(reader, json->at)) != NULL) {
            outcome = PLAIN;
            if (other->size >= 0)
                outcome = read_span(reader, group, other->data, (size_t)other->size);
            if (outcome == ODD || !skip_value(json)) return GIVE_UP;
        } else {
            outcome = json_span(reader, json, group);
        }
        if (outcome == FAILED) return reader->error;
        if (outcome == ODD) {
            undo(spans);
            *json = before;
            if (!skip_value(json)) return GIVE_UP;
            if (!put_part(&spans->odd, group, before.at - reader->body,
                          (size_t)(json->at - before.at)))
                return NO_MEMORY;
        }
    }
    return more == END ? DONE : GIVE_UP;
}

static int json_scopes(Reader *reader, Json *json, int32_t group)
{
    static const Name NAMES[] = {NAME("spans"), NO_NAME};
    int first = 1, more, index, error;
    if (!open_bracket(json, '[')) return GIVE_UP;
    while ((more = next_item(json, ']', &first)) == MORE) {
        unsigned seen = 0;
        if (++reader->spans->groups > reader->limits->max_spans) return GIVE_UP;
        if (!open_bracket(json, '{')) return GIVE_UP;
        while ((index = next_member(json, NAMES, &seen)) >= 0)
            if ((error = json_spans(reader, json, group)) != DONE) return error;
        if (index != LAST) return GIVE_UP;
    }
    return more == END ? DONE : GIVE_UP;
}

static int json_group(Reader *reader, Json *json, int32_t group)
{
    static const Name NAMES[] = {NAME("resource"), NAME("scopeSpans"), NO_NAME};
    const u8 *start;
    unsigned seen = 0;
    int index, error;
    if (!open_bracket(json, '{')) return GIVE_UP;
    while ((index = next_member(json, NAMES, &seen)) >= 0) {
        if (index == 0) {
            start = json->at;
            if (!skip_value(json)) return GIVE_UP;
            if (!put_part(&reader->spans->resources, group, start - reader->body,
                          (size_t)(json->at - start)))
                return NO_MEMORY;
        } else if ((error = json_scopes(reader, json, group)) != DONE) {
            return error;
        }
    }
    return index == LAST ? DONE : GIVE_UP;
}

static int json_request(Reader *reader, size_t size)
{
    static const Name NAMES[] = {NAME("resourceSpans"), NO_NAME};
    const Limits *limits = reader->limits;
    Json json = {reader->body, reader->body + size, limits->max_json_values,
                 limits->max_json_depth < DEEPEST ? limits->max_json_depth : DEEPEST};
    unsigned seen = 0;
    int32_t group = 0;
    int first = 1, more, index, error;
    if (!is_utf8(json.at, json.end) || !open_bracket(&json, '{')) return GIVE_UP;
    while ((index = next_member(&json, NAMES, &seen)) >= 0) {
        if (!open_bracket(&json, '[')) return GIVE_UP;
        while ((more = next_item(&json, ']', &first)) == MORE) {
            if (++reader->spans->groups > limits->max_spans) return GIVE_UP;
            if ((error = json_group(reader, &json, group++)) != DONE) return error;
        }
        if (more != END) return GIVE_UP;
    }
    peek(&json);
    if (index != LAST || json.at != json.end) return GIVE_UP;
    reader->spans->resource_groups = group;
    return DONE;
}
