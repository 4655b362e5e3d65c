/* Decodes OTLP trace requests straight into columns; used by compiled.py with ctypes. Protobuf is
 * decoded here, JSON in wire_json.h, which this file includes.
 *
 * It has no access to Python: a call runs without the interpreter's lock. What it accepts, it
 * decodes as the decoder in Python does. Whatever is unusual, it leaves to that decoder, which is
 * the reference:
 *
 *   - A span with anything unusual (an attribute that is not plain text or a number, a limit, an
 *     invalid id, an unknown encoding of a field) is listed as odd. The caller decodes it with the
 *     reference, and calls again with plain replacements of the odd spans.
 *   - A request whose outer messages have anything unusual is given up as a whole.
 *
 * So no error message and no limit has its own rules here, and a mistake on the careful side costs
 * time only. Every read is bounded by the end of its message.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 4

enum { DONE = 0, GIVE_UP = 1, NO_MEMORY = 2 };

typedef uint8_t u8;

/* ---- growing arrays ---- */

typedef struct {
    u8 *data;
    size_t length, room;
} Bytes;

typedef struct {
    int32_t *data;
    size_t length, room;
} Ints;

typedef struct {
    int64_t *data;
    size_t length, room;
} Longs;

static int grow(void **data, size_t *room, size_t wanted, size_t item)
{
    size_t more = *room ? *room : 16;
    void *moved;
    if (wanted > SIZE_MAX / 4 / item) return 0;
    while (more < wanted) more *= 2;
    moved = realloc(*data, more * item);
    if (!moved) return 0;
    *data = moved;
    *room = more;
    return 1;
}

#define RESERVE(array, more)                                                                       \
    ((array)->length + (more) <= (array)->room ||                                                  \
     grow((void **)&(array)->data, &(array)->room, (array)->length + (more),                       \
          sizeof *(array)->data))

static int put_bytes(Bytes *bytes, const u8 *data, size_t size)
{
    if (!RESERVE(bytes, size)) return 0;
    if (size) memcpy(bytes->data + bytes->length, data, size);
    bytes->length += size;
    return 1;
}

static int put_int(Ints *ints, int32_t value)
{
    if (!RESERVE(ints, 1)) return 0;
    ints->data[ints->length++] = value;
    return 1;
}

/* Note a part of the body: its group, start and end. */
static int put_part(Longs *parts, int64_t group, int64_t start, size_t size)
{
    if (!RESERVE(parts, 3)) return 0;
    parts->data[parts->length++] = group;
    parts->data[parts->length++] = start;
    parts->data[parts->length++] = start + (int64_t)size;
    return 1;
}

/* ---- hashing: SipHash-1-3 with a random key, so that no sender can choose colliding texts ---- */

static uint64_t secret[2];

#define ROTATE(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
#define SIP_ROUND                                                                                  \
    do {                                                                                           \
        v0 += v1; v1 = ROTATE(v1, 13); v1 ^= v0; v0 = ROTATE(v0, 32);                              \
        v2 += v3; v3 = ROTATE(v3, 16); v3 ^= v2;                                                   \
        v0 += v3; v3 = ROTATE(v3, 21); v3 ^= v0;                                                   \
        v2 += v1; v1 = ROTATE(v1, 17); v1 ^= v2; v2 = ROTATE(v2, 32);                              \
    } while (0)

static uint32_t hash_of(const u8 *data, size_t size)
{
    uint64_t v0 = secret[0] ^ 0x736f6d6570736575ULL, v1 = secret[1] ^ 0x646f72616e646f6dULL;
    uint64_t v2 = secret[0] ^ 0x6c7967656e657261ULL, v3 = secret[1] ^ 0x7465646279746573ULL;
    uint64_t word, last = (uint64_t)size << 56;
    const u8 *end = data + (size & ~(size_t)7);
    for (; data != end; data += 8) {
        memcpy(&word, data, 8);
        v3 ^= word;
        SIP_ROUND;
        v0 ^= word;
    }
    word = 0;
    if (size & 7) memcpy(&word, data, size & 7);
    last |= word;
    v3 ^= last;
    SIP_ROUND;
    v0 ^= last;
    v2 ^= 0xff;
    SIP_ROUND;
    SIP_ROUND;
    SIP_ROUND;
    word = v0 ^ v1 ^ v2 ^ v3;
    return (uint32_t)(word ^ word >> 32);
}

/* ---- dictionaries: distinct texts, numbered in the order of their first use ---- */

typedef struct {
    Bytes text;       /* all texts, one after the other */
    Ints offsets;     /* where each of them starts, and where the last one ends */
    Ints hashes;      /* as many as there are texts */
    int32_t *slots;   /* number + 1; 0 is empty */
    size_t slot_count;
    int32_t last;     /* the number that was used last, or -1 */
} Dictionary;

static void dictionary_init(Dictionary *dictionary)
{
    memset(dictionary, 0, sizeof *dictionary);
    dictionary->last = -1;
}

static void dictionary_free(Dictionary *dictionary)
{
    free(dictionary->text.data);
    free(dictionary->offsets.data);
    free(dictionary->hashes.data);
    free(dictionary->slots);
}

static size_t count_of(const Dictionary *dictionary)
{
    return dictionary->offsets.length ? dictionary->offsets.length - 1 : 0;
}

static int equals(const Dictionary *dictionary, int32_t number, const u8 *text, size_t size)
{
    size_t start = (size_t)dictionary->offsets.data[number];
    return (size_t)dictionary->offsets.data[number + 1] - start == size &&
           (!size || memcmp(dictionary->text.data + start, text, size) == 0);
}

static int rehash(Dictionary *dictionary)
{
    size_t count = dictionary->slot_count ? dictionary->slot_count * 4 : 32, i;
    int32_t *slots = calloc(count, sizeof *slots);
    if (!slots) return 0;
    for (i = 0; i < count_of(dictionary); i++) {
        size_t at = (uint32_t)dictionary->hashes.data[i] & (count - 1);
        while (slots[at]) at = (at + 1) & (count - 1);
        slots[at] = (int32_t)i + 1;
    }
    free(dictionary->slots);
    dictionary->slots = slots;
    dictionary->slot_count = count;
    return 1;
}

/* The number of a text, which is added if it is new; -1 if there is no room. */
static int32_t number_of(Dictionary *dictionary, const u8 *text, size_t size)
{
    uint32_t hash;
    size_t at;
    int32_t number = dictionary->last;
    if (number >= 0 && equals(dictionary, number, text, size)) return number;
    if (count_of(dictionary) * 2 >= dictionary->slot_count && !rehash(dictionary)) return -1;
    hash = hash_of(text, size);
    at = hash & (dictionary->slot_count - 1);
    while ((number = dictionary->slots[at] - 1) >= 0) {
        if ((uint32_t)dictionary->hashes.data[number] == hash &&
            equals(dictionary, number, text, size))
            return dictionary->last = number;
        at = (at + 1) & (dictionary->slot_count - 1);
    }
    if (dictionary->text.length + size > INT32_MAX) return -1;
    number = (int32_t)count_of(dictionary);
    if (!RESERVE(&dictionary->offsets, 2) || !RESERVE(&dictionary->hashes, 1) ||
        !put_bytes(&dictionary->text, text, size))
        return -1;
    if (!dictionary->offsets.length) dictionary->offsets.data[dictionary->offsets.length++] = 0;
    dictionary->offsets.data[dictionary->offsets.length++] = (int32_t)dictionary->text.length;
    dictionary->hashes.data[dictionary->hashes.length++] = (int32_t)hash;
    dictionary->slots[at] = number + 1;
    return dictionary->last = number;
}

/* The number of a text that is there, or -1. */
static int32_t look_up(const Dictionary *dictionary, const u8 *text, size_t size)
{
    int32_t number;
    size_t at;
    if (!dictionary->slot_count) return -1;
    at = hash_of(text, size) & (dictionary->slot_count - 1);
    while ((number = dictionary->slots[at] - 1) >= 0) {
        if (equals(dictionary, number, text, size)) return number;
        at = (at + 1) & (dictionary->slot_count - 1);
    }
    return -1;
}

/* ---- the spans of a request ---- */

typedef struct {
    Dictionary dictionary;
    Ints numbers; /* -1 is null; rows after the last one are null, too */
} Column;

enum { MOST_COLUMNS = 64 };

/* The attributes that have a column, in their order. */
typedef struct {
    Dictionary keys;
} Keys;

typedef struct {
    int64_t spans, groups, resource_groups;
    Longs times, ends;
    Bytes trace_ids, span_ids, parent_ids; /* of 16, 8 and 8 bytes */
    Bytes has_parent, kinds, statuses;
    Ints group; /* the resource of each row */
    Column name;
    Column columns[MOST_COLUMNS];
    Dictionary keys, values; /* of the other attributes */
    Ints rest_keys, rest_values, rest_ends;
    Longs resources; /* group, start and end of each part of a resource in the body */
    Longs odd;       /* group, start and end of each odd span */
    int64_t attributes;
    int column_count;
} Spans;

typedef struct {
    int64_t max_spans, max_unknown, max_span_bytes;
    int64_t max_attributes, max_attribute_length, max_key_length, max_name_length;
    int64_t max_json_depth, max_json_values;
} Limits;

/* A span to be read instead of the one at `start` in the body: none, if `size` is negative. */
typedef struct {
    int64_t start;
    const u8 *data;
    int64_t size;
} Replacement;

/* What an attribute at some place of a span's list was. In the next span it is mostly the same. */
typedef struct {
    const u8 *key;
    size_t key_size;
    int32_t column; /* -1: it has none */
    int32_t number; /* of the key, without a column */
    int32_t value;  /* its number in its dictionary */
} Guess;

enum { GUESSES = 64 };

/* The keys of what becomes an attribute here: EVENTS and STATUS_MESSAGE of batchmill.spool. */
static const char EVENTS[] = "batchmill.events", MESSAGE[] = "otel.status_description";

typedef struct {
    const Keys *keys;
    const Limits *limits;
    const u8 *body;
    const Replacement *replacements;
    int64_t replacement_count, replaced;
    int64_t unknown;
    Spans *spans;
    Guess guesses[GUESSES];
    Bytes scratch; /* a text of JSON without its escapes */
    Bytes events;  /* those of a span, as JSON */
    int event_column, message_column; /* of events, and of the status message; -1: there is none */
    int error;     /* why the request is given up */
} Reader;

/* A span but for its attributes. */
typedef struct {
    const u8 *trace, *own, *parent, *name;
    size_t trace_size, own_size, parent_size, name_size;
    uint64_t start, end, kind, code;
} Span;

static const char DIGITS[] = "0123456789abcdef";

static void write_hex(u8 *out, const u8 *data, size_t size)
{
    size_t i;
    for (i = 0; i < size; i++) {
        *out++ = (u8)DIGITS[data[i] >> 4];
        *out++ = (u8)DIGITS[data[i] & 15];
    }
}

static int all_zero(const u8 *data, size_t size)
{
    while (size--)
        if (*data++) return 0;
    return 1;
}

/* Whether bytes are valid UTF-8, as protobuf and Python define it. */
static int is_utf8(const u8 *at, const u8 *end)
{
    while (at < end) {
        uint64_t word;
        unsigned c;
        if (end - at >= 8) {
            memcpy(&word, at, 8);
            if (!(word & 0x8080808080808080ULL)) {
                at += 8;
                continue;
            }
        }
        c = *at;
        if (c < 0x80) {
            at++;
        } else if (c < 0xc2) {
            return 0;
        } else if (c < 0xe0) {
            if (end - at < 2 || (at[1] & 0xc0) != 0x80) return 0;
            at += 2;
        } else if (c < 0xf0) {
            if (end - at < 3 || (at[1] & 0xc0) != 0x80 || (at[2] & 0xc0) != 0x80) return 0;
            if (c == 0xe0 && at[1] < 0xa0) return 0;
            if (c == 0xed && at[1] > 0x9f) return 0; /* surrogates */
            at += 3;
        } else if (c < 0xf5) {
            if (end - at < 4 || (at[1] & 0xc0) != 0x80 || (at[2] & 0xc0) != 0x80 ||
                (at[3] & 0xc0) != 0x80)
                return 0;
            if (c == 0xf0 && at[1] < 0x90) return 0;
            if (c == 0xf4 && at[1] > 0x8f) return 0;
            at += 4;
        } else {
            return 0;
        }
    }
    return 1;
}

/* ---- protobuf's wire format ---- */

typedef struct {
    const u8 *at, *end;
} Cursor;

typedef struct {
    uint32_t number;
    uint32_t wire;     /* 0: varint, 1: 8 bytes, 2: bytes, 5: 4 bytes */
    uint64_t value;    /* of 0 and 1 */
    const u8 *data;    /* of 2 */
    size_t size;
} Field;

/* Only numbers in their shortest form: another form is unusual. */
static int read_varint(Cursor *cursor, uint64_t *value)
{
    uint64_t result = 0;
    int shift;
    for (shift = 0; shift < 64 && cursor->at < cursor->end; shift += 7) {
        u8 byte = *cursor->at++;
        result |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            if ((shift && !byte) || (shift == 63 && byte > 1)) return 0;
            *value = result;
            return 1;
        }
    }
    return 0;
}

/* The next field; 0 at anything unusual, or invalid. */
static int read_field(Cursor *cursor, Field *field)
{
    uint64_t tag, size;
    if (!read_varint(cursor, &tag) || tag >> 3 == 0 || tag > UINT32_MAX) return 0;
    field->number = (uint32_t)(tag >> 3);
    field->wire = tag & 7;
    switch (field->wire) {
    case 0:
        return read_varint(cursor, &field->value);
    case 1:
        if (cursor->end - cursor->at < 8) return 0;
        memcpy(&field->value, cursor->at, 8);
        cursor->at += 8;
        return 1;
    case 2:
        if (!read_varint(cursor, &size) || size > (uint64_t)(cursor->end - cursor->at)) return 0;
        field->data = cursor->at;
        field->size = (size_t)size;
        cursor->at += size;
        return 1;
    case 5:
        if (cursor->end - cursor->at < 4) return 0;
        cursor->at += 4;
        return 1;
    }
    return 0;
}

/* ---- messages whose content is not kept, but has to be valid ---- */

/* A field of a message: its number, wire type, and what it holds. */
enum { RAW, TEXT, EVENT, LINK, KEY_VALUE, ANY_VALUE, VALUES, PAIRS };

typedef struct {
    u8 number, wire, content;
} Known;

static const Known KNOWN[][10] = {
    [EVENT] = {{1, 1, RAW}, {2, 2, TEXT}, {3, 2, KEY_VALUE}, {4, 0, RAW}},
    [LINK] = {{1, 2, RAW}, {2, 2, RAW}, {3, 2, TEXT}, {4, 2, KEY_VALUE}, {5, 0, RAW}, {6, 5, RAW}},
    [KEY_VALUE] = {{1, 2, TEXT}, {2, 2, ANY_VALUE}},
    [ANY_VALUE] = {{1, 2, TEXT}, {2, 0, RAW}, {3, 0, RAW}, {4, 1, RAW}, {5, 2, VALUES},
                   {6, 2, PAIRS}, {7, 2, RAW}},
    [VALUES] = {{1, 2, ANY_VALUE}},
    [PAIRS] = {{1, 2, KEY_VALUE}},
};

static int is_valid(int message, const u8 *data, size_t size, int depth)
{
    Cursor cursor = {data, data + size};
    Field field;
    if (depth == 0) return 0;
    while (cursor.at < cursor.end) {
        const Known *known = KNOWN[message];
        if (!read_field(&cursor, &field)) return 0;
        while (known->number && known->number != field.number) known++;
        if (known->number == 0 || known->wire != field.wire) return 0;
        if (known->content == RAW) continue;
        if (known->content == TEXT) {
            if (!is_utf8(field.data, field.data + field.size)) return 0;
        } else if (!is_valid(known->content, field.data, field.size, depth - 1)) {
            return 0;
        }
    }
    return 1;
}

/* ---- values as text ---- */

static size_t write_int(int64_t value, char *out)
{
    char reversed[20];
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    size_t count = 0, size = 0;
    do {
        reversed[count++] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (value < 0) out[size++] = '-';
    while (count) out[size++] = reversed[--count];
    return size;
}

/* A double as Python's repr() writes it; 0 if this cannot tell. */
static size_t write_double(double value, char *out, size_t room)
{
    char digits[40], *mark;
    int precision, exponent, count, fraction;
    if (isnan(value)) return (size_t)snprintf(out, room, "NaN");
    if (isinf(value)) return (size_t)snprintf(out, room, value > 0 ? "Infinity" : "-Infinity");
    if (value == 0) return (size_t)snprintf(out, room, signbit(value) ? "-0.0" : "0.0");
    if (fabs(value) < DBL_MIN) return 0; /* has fewer digits than the others */
    for (precision = 14; precision < 17; precision++) {
        snprintf(digits, sizeof digits, "%.*e", precision, value);
        if (strtod(digits, NULL) == value) break;
    }
    if (precision == 17) return 0;
    /* Up to 15 digits there is only one such text. Beyond, a power of two has neighbours at unequal
     * distances, and the shortest text may be another one. */
    if (precision > 14 && fabs(frexp(value, &exponent)) == 0.5) return 0;
    mark = strchr(digits, 'e');
    if (!mark) return 0;
    exponent = atoi(mark + 1);
    /* The digits alone, without the point and without zeros at the end. */
    {
        char *from = digits, *to = digits;
        int negative = *from == '-';
        if (negative) from++;
        if (from[1] != '.') return 0; /* another locale */
        *to++ = *from;
        for (from += 2; from < mark; from++) *to++ = *from;
        while (to > digits + 1 && to[-1] == '0') to--;
        *to = 0;
        count = (int)(to - digits);
        if (exponent < -4 || exponent >= 16) {
            fraction = count > 1;
            return (size_t)snprintf(out, room, "%s%c%s%se%c%02d", negative ? "-" : "", digits[0],
                                    fraction ? "." : "", fraction ? digits + 1 : "",
                                    exponent < 0 ? '-' : '+', abs(exponent));
        }
        if (exponent < 0)
            return (size_t)snprintf(out, room, "%s0.%.*s%s", negative ? "-" : "", -exponent - 1,
                                    "0000", digits);
        if (exponent + 1 >= count)
            return (size_t)snprintf(out, room, "%s%s%.*s.0", negative ? "-" : "", digits,
                                    exponent + 1 - count, "0000000000000000");
        return (size_t)snprintf(out, room, "%s%.*s.%s", negative ? "-" : "", exponent + 1, digits,
                                digits + exponent + 1);
    }
}

/* ---- spans ---- */

enum { PLAIN = 1, ODD = 0, FAILED = -1 };

static int failed(Reader *reader, int error)
{
    reader->error = error;
    return FAILED;
}

static int set_column(Reader *reader, Column *column, size_t row, int32_t number)
{
    if (column->numbers.length > row) return ODD; /* set before: the key is repeated */
    if (number < 0 || !RESERVE(&column->numbers, row + 1 - column->numbers.length))
        return failed(reader, NO_MEMORY);
    while (column->numbers.length < row) column->numbers.data[column->numbers.length++] = -1;
    column->numbers.data[column->numbers.length++] = number;
    return PLAIN;
}

static int is_key(const Guess *guess, const u8 *key, size_t size)
{
    return size && guess->key_size == size && memcmp(guess->key, key, size) == 0;
}

static int put_attribute(Reader *reader, size_t row, size_t first_rest, Guess *guess,
                         const u8 *text, size_t size)
{
    Spans *spans = reader->spans;
    Dictionary *values = &spans->values;
    size_t i;
    if (guess->column >= 0) values = &spans->columns[guess->column].dictionary;
    if (guess->value < 0 || !equals(values, guess->value, text, size))
        guess->value = number_of(values, text, size);
    if (guess->column >= 0)
        return set_column(reader, &spans->columns[guess->column], row, guess->value);
    for (i = first_rest; i < spans->rest_keys.length; i++)
        if (spans->rest_keys.data[i] == guess->number) return ODD;
    if (guess->value < 0 || !put_int(&spans->rest_keys, guess->number) ||
        !put_int(&spans->rest_values, guess->value))
        return failed(reader, NO_MEMORY);
    return PLAIN;
}

/* Look a key up; 0 without memory. */
static int find_key(Reader *reader, Guess *guess, const u8 *key, size_t size)
{
    guess->key = key;
    guess->key_size = size;
    guess->value = guess->number = -1;
    guess->column = look_up(&reader->keys->keys, key, size);
    if (guess->column < 0) guess->number = number_of(&reader->spans->keys, key, size);
    return guess->column >= 0 || guess->number >= 0;
}

/* Read the attribute at `place` in the list of a span. */
static int read_attribute(Reader *reader, size_t row, size_t first_rest, size_t place,
                          const u8 *data, size_t size)
{
    const Limits *limits = reader->limits;
    Guess *guess = &reader->guesses[place % GUESSES];
    Cursor cursor = {data, data + size};
    Field key, value, content;
    char buffer[64];
    size_t written;
    double number;
    if (!read_field(&cursor, &key) || key.number != 1 || key.wire != 2) return ODD;
    if (!read_field(&cursor, &value) || value.number != 2 || value.wire != 2) return ODD;
    if (cursor.at != cursor.end) return ODD;
    if (!is_key(guess, key.data, key.size)) {
        if (!key.size || (int64_t)key.size > limits->max_key_length ||
            !is_utf8(key.data, key.data + key.size))
            return ODD;
        if (!find_key(reader, guess, key.data, key.size)) return failed(reader, NO_MEMORY);
    }
    cursor.at = value.data;
    cursor.end = value.data + value.size;
    if (!read_field(&cursor, &content) || cursor.at != cursor.end) return ODD;
    switch (content.number << 3 | content.wire) {
    case 1 << 3 | 2:
        if ((int64_t)content.size > limits->max_attribute_length ||
            !is_utf8(content.data, content.data + content.size))
            return ODD;
        return put_attribute(reader, row, first_rest, guess, content.data, content.size);
    case 2 << 3 | 0:
        if (content.value > 1) return ODD;
        written = (size_t)snprintf(buffer, sizeof buffer, content.value ? "true" : "false");
        break;
    case 3 << 3 | 0:
        written = write_int((int64_t)content.value, buffer);
        break;
    case 4 << 3 | 1:
        memcpy(&number, &content.value, 8);
        written = write_double(number, buffer, sizeof buffer);
        if (!written) return ODD;
        break;
    default:
        return ODD;
    }
    if ((int64_t)written > limits->max_attribute_length) return ODD;
    return put_attribute(reader, row, first_rest, guess, (const u8 *)buffer, written);
}

/* ---- events, which are kept as JSON ---- */

enum { EVENT_ROOM = 4, MOST_EVENT_ATTRIBUTES = 32 };

static int put_json(Bytes *out, const u8 *text, size_t size)
{
    static const char SHORT[] = "btn?fr"; /* from 8 on */
    size_t i;
    if (!RESERVE(out, 6 * size + 2)) return 0;
    out->data[out->length++] = '"';
    for (i = 0; i < size; i++) {
        u8 letter = text[i];
        if (letter == '"' || letter == '\\') {
            out->data[out->length++] = '\\';
            out->data[out->length++] = letter;
        } else if (letter >= 0x20) {
            out->data[out->length++] = letter;
        } else if (letter >= 8 && letter <= 13 && letter != 11) {
            out->data[out->length++] = '\\';
            out->data[out->length++] = (u8)SHORT[letter - 8];
        } else {
            memcpy(out->data + out->length, "\\u00", 4);
            out->data[out->length + 4] = (u8)DIGITS[letter >> 4];
            out->data[out->length + 5] = (u8)DIGITS[letter & 15];
            out->length += 6;
        }
    }
    out->data[out->length++] = '"';
    return 1;
}

#define PUT_WORDS(out, words) put_bytes(out, (const u8 *)(words), sizeof(words) - 1)

/* Write an attribute of an event: `"key":"value"`. */
static int event_attribute(Reader *reader, const u8 *data, size_t size, Field *key)
{
    const Limits *limits = reader->limits;
    Bytes *out = &reader->events;
    Cursor cursor = {data, data + size};
    Field value, content;
    char buffer[64];
    const u8 *text = (const u8 *)buffer;
    size_t written;
    double number;
    if (!read_field(&cursor, key) || key->number != 1 || key->wire != 2) return ODD;
    if (!read_field(&cursor, &value) || value.number != 2 || value.wire != 2) return ODD;
    if (cursor.at != cursor.end || !key->size || (int64_t)key->size > limits->max_key_length)
        return ODD;
    cursor.at = value.data;
    cursor.end = value.data + value.size;
    if (!read_field(&cursor, &content) || cursor.at != cursor.end) return ODD;
    switch (content.number << 3 | content.wire) {
    case 1 << 3 | 2:
        text = content.data;
        written = content.size;
        break;
    case 2 << 3 | 0:
        if (content.value > 1) return ODD;
        written = (size_t)snprintf(buffer, sizeof buffer, content.value ? "true" : "false");
        break;
    case 3 << 3 | 0:
        written = write_int((int64_t)content.value, buffer);
        break;
    case 4 << 3 | 1:
        memcpy(&number, &content.value, 8);
        written = write_double(number, buffer, sizeof buffer);
        if (!written) return ODD;
        break;
    default:
        return ODD;
    }
    if ((int64_t)written > limits->max_attribute_length) return ODD;
    if (!put_json(out, key->data, key->size) || !PUT_WORDS(out, ":") ||
        !put_json(out, text, written))
        return failed(reader, NO_MEMORY);
    return PLAIN;
}

/* Add an event, which is valid, to those of its span. */
static int read_event(Reader *reader, const u8 *data, size_t size, int64_t *attributes)
{
    Bytes *out = &reader->events;
    Cursor cursor = {data, data + size};
    Field field, keys[MOST_EVENT_ATTRIBUTES], name = {0};
    uint64_t moment = 0;
    char buffer[32];
    int count = 0, i, outcome;
    while (cursor.at < cursor.end) {
        if (!read_field(&cursor, &field)) return ODD;
        if (field.number == 1) moment = field.value;
        if (field.number == 2) name = field;
    }
    if (!PUT_WORDS(out, ",{\"time\":") ||
        !put_bytes(out, (const u8 *)buffer, write_int((int64_t)(moment / 1000), buffer)) ||
        !PUT_WORDS(out, ",\"name\":") || !put_json(out, name.data, name.size) ||
        !PUT_WORDS(out, ",\"attributes\":{"))
        return failed(reader, NO_MEMORY);
    cursor.at = data;
    while (cursor.at < cursor.end) {
        if (!read_field(&cursor, &field)) return ODD;
        if (field.number != 3) continue;
        if (count == MOST_EVENT_ATTRIBUTES || count >= reader->limits->max_attributes) return ODD;
        if (count && !PUT_WORDS(out, ",")) return failed(reader, NO_MEMORY);
        outcome = event_attribute(reader, field.data, field.size, &keys[count]);
        if (outcome != PLAIN) return outcome;
        for (i = 0; i < count; i++)
            if (keys[i].size == keys[count].size &&
                memcmp(keys[i].data, keys[count].data, keys[i].size) == 0)
                return ODD; /* the key is repeated */
        count++;
    }
    *attributes += count;
    if (!PUT_WORDS(out, "}}")) return failed(reader, NO_MEMORY);
    if ((int64_t)out->length > EVENT_ROOM * reader->limits->max_attribute_length) return ODD;
    return PLAIN;
}

/* Put a text into a column of the span that is being read. */
static int put_text(Reader *reader, int column, size_t row, const u8 *text, size_t size)
{
    Column *place = &reader->spans->columns[column];
    return set_column(reader, place, row, number_of(&place->dictionary, text, size));
}

/* Put the events that were read into their column. */
static int put_events(Reader *reader, size_t row)
{
    Bytes *out = &reader->events;
    if (!out->length || reader->event_column < 0) return PLAIN;
    if (!PUT_WORDS(out, "]")) return failed(reader, NO_MEMORY);
    out->data[0] = '['; /* in place of the comma before the first one */
    return put_text(reader, reader->event_column, row, out->data, out->length);
}

/* Add a span, whose attributes are there already, to the columns. */
static int add_span(Reader *reader, int32_t group, const Span *span, int64_t attributes)
{
    Spans *spans = reader->spans;
    int outcome;
    if (span->trace_size != 16 || all_zero(span->trace, 16)) return ODD;
    if (span->own_size != 8 || all_zero(span->own, 8)) return ODD;
    if ((span->parent_size && span->parent_size != 8) || !span->start || span->end < span->start)
        return ODD;
    if (span->kind > 5 || span->code > 2) return ODD;
    if ((int64_t)span->name_size > reader->limits->max_name_length) return ODD;
    outcome = set_column(reader, &spans->name, spans->times.length,
                         number_of(&spans->name.dictionary, span->name, span->name_size));
    if (outcome != PLAIN) return outcome;
    if (!put_bytes(&spans->trace_ids, span->trace, 16) ||
        !put_bytes(&spans->span_ids, span->own, 8) ||
        !RESERVE(&spans->parent_ids, 8) || !RESERVE(&spans->has_parent, 1) ||
        !RESERVE(&spans->kinds, 1) || !RESERVE(&spans->statuses, 1) ||
        !RESERVE(&spans->group, 1) || !RESERVE(&spans->rest_ends, 1) ||
        !RESERVE(&spans->times, 1) || !RESERVE(&spans->ends, 1))
        return failed(reader, NO_MEMORY);
    /* Some senders give a root span a parent of zeros. */
    if (span->parent_size && !all_zero(span->parent, 8)) {
        put_bytes(&spans->parent_ids, span->parent, 8);
        spans->has_parent.data[spans->has_parent.length++] = 1;
    } else {
        spans->has_parent.data[spans->has_parent.length++] = 0;
    }
    spans->kinds.data[spans->kinds.length++] = (u8)span->kind;
    spans->statuses.data[spans->statuses.length++] = (u8)span->code;
    spans->group.data[spans->group.length++] = group;
    spans->rest_ends.data[spans->rest_ends.length++] = (int32_t)spans->rest_keys.length;
    spans->times.data[spans->times.length++] = (int64_t)(span->start / 1000);
    spans->ends.data[spans->ends.length++] = (int64_t)(span->end / 1000);
    spans->attributes += attributes;
    return PLAIN;
}

static int read_span(Reader *reader, int32_t group, const u8 *data, size_t size)
{
    Spans *spans = reader->spans;
    const Limits *limits = reader->limits;
    Cursor cursor = {data, data + size};
    Field field, status;
    Span span = {0};
    int64_t attributes = 0, of_events = 0;
    size_t row = spans->times.length, first_rest = spans->rest_keys.length;
    int outcome, has_status = 0;
    reader->events.length = 0;
    while (cursor.at < cursor.end) {
        if (!read_field(&cursor, &field)) return ODD;
        switch (field.number << 3 | field.wire) {
        case 1 << 3 | 2:
            span.trace = field.data;
            span.trace_size = field.size;
            break;
        case 2 << 3 | 2:
            span.own = field.data;
            span.own_size = field.size;
            break;
        case 3 << 3 | 2: /* trace_state */
            if (!is_utf8(field.data, field.data + field.size)) return ODD;
            break;
        case 4 << 3 | 2:
            span.parent = field.data;
            span.parent_size = field.size;
            break;
        case 5 << 3 | 2:
            span.name = field.data;
            span.name_size = field.size;
            if (!is_utf8(field.data, field.data + field.size)) return ODD;
            break;
        case 6 << 3 | 0:
            span.kind = field.value;
            break;
        case 7 << 3 | 1:
            span.start = field.value;
            break;
        case 8 << 3 | 1:
            span.end = field.value;
            break;
        case 9 << 3 | 2:
            if (++attributes > limits->max_attributes) return ODD;
            outcome = read_attribute(reader, row, first_rest, (size_t)attributes - 1, field.data,
                                     field.size);
            if (outcome != PLAIN) return outcome;
            break;
        case 10 << 3 | 0: /* dropped_attributes_count */
        case 12 << 3 | 0: /* dropped_events_count */
        case 14 << 3 | 0: /* dropped_links_count */
        case 16 << 3 | 5: /* flags */
            break;
        case 11 << 3 | 2:
            if (!is_valid(EVENT, field.data, field.size, 8)) return ODD;
            outcome = read_event(reader, field.data, field.size, &of_events);
            if (outcome != PLAIN) return outcome;
            break;
        case 13 << 3 | 2:
            if (!is_valid(LINK, field.data, field.size, 8)) return ODD;
            break;
        case 15 << 3 | 2: {
            Cursor inside = {field.data, field.data + field.size};
            if (has_status++) return ODD;
            while (inside.at < inside.end) {
                if (!read_field(&inside, &status)) return ODD;
                if (status.number == 3 && status.wire == 0)
                    span.code = status.value;
                else if (status.number != 2 || status.wire != 2 ||
                         !is_utf8(status.data, status.data + status.size) ||
                         (int64_t)status.size > limits->max_attribute_length)
                    return ODD;
                else if (status.size && reader->message_column >= 0) {
                    outcome = put_text(reader, reader->message_column, row, status.data,
                                       status.size);
                    if (outcome != PLAIN) return outcome;
                }
            }
            break;
        }
        default:
            return ODD;
        }
    }
    outcome = put_events(reader, row);
    if (outcome != PLAIN) return outcome;
    return add_span(reader, group, &span, attributes + of_events);
}

/* Take back what an odd span has put into the columns. */
static void undo(Spans *spans)
{
    size_t rows = spans->times.length, rest = rows ? (size_t)spans->rest_ends.data[rows - 1] : 0;
    int i;
    for (i = 0; i < spans->column_count; i++)
        if (spans->columns[i].numbers.length > rows) spans->columns[i].numbers.length = rows;
    if (spans->name.numbers.length > rows) spans->name.numbers.length = rows;
    spans->rest_keys.length = spans->rest_values.length = rest;
}

/* The replacement of the span at `start`, or NULL. */
static const Replacement *replacement_of(Reader *reader, const u8 *start)
{
    if (reader->replaced < reader->replacement_count &&
        reader->replacements[reader->replaced].start == start - reader->body)
        return &reader->replacements[reader->replaced++];
    return NULL;
}

static int read_spans(Reader *reader, int32_t group, const u8 *data, size_t size)
{
    Cursor cursor = {data, data + size};
    Spans *spans = reader->spans;
    const Replacement *other;
    const u8 *start;
    Field field;
    int outcome;
    while (cursor.at < cursor.end) {
        if (!read_field(&cursor, &field)) return GIVE_UP;
        if (field.number != 2 || field.wire != 2) {
            if (++reader->unknown > reader->limits->max_unknown) return GIVE_UP;
            continue;
        }
        if (++spans->spans > reader->limits->max_spans) return GIVE_UP;
        start = field.data;
        if ((other = replacement_of(reader, start)) != NULL) {
            if (other->size < 0) continue;
            field.data = other->data;
            field.size = (size_t)other->size;
        }
        outcome = ODD;
        if ((int64_t)field.size <= reader->limits->max_span_bytes)
            outcome = read_span(reader, group, field.data, field.size);
        if (outcome == FAILED) return reader->error;
        if (outcome == ODD) {
            undo(spans);
            if (!put_part(&spans->odd, group, start - reader->body, field.size)) return NO_MEMORY;
        }
    }
    return DONE;
}

static int read_group(Reader *reader, int32_t group, const u8 *data, size_t size)
{
    Cursor cursor = {data, data + size};
    Spans *spans = reader->spans;
    int64_t start, resource_bytes = 0;
    Field field;
    int error;
    while (cursor.at < cursor.end) {
        if (!read_field(&cursor, &field)) return GIVE_UP;
        if (field.wire != 2 || field.number > 2) {
            if (++reader->unknown > reader->limits->max_unknown) return GIVE_UP;
            continue;
        }
        if (++spans->groups > reader->limits->max_spans) return GIVE_UP;
        if (field.number == 1) {
            start = field.data - reader->body;
            resource_bytes += (int64_t)field.size;
            if (resource_bytes > reader->limits->max_span_bytes) return GIVE_UP;
            if (!put_part(&spans->resources, group, start, field.size)) return NO_MEMORY;
        } else if ((error = read_spans(reader, group, field.data, field.size)) != DONE) {
            return error;
        }
    }
    return DONE;
}

static int read_request(Reader *reader, size_t size)
{
    Cursor cursor = {reader->body, reader->body + size};
    int32_t group = 0;
    Field field;
    int error;
    while (cursor.at < cursor.end) {
        if (!read_field(&cursor, &field)) return GIVE_UP;
        if (field.number != 1 || field.wire != 2) {
            if (++reader->unknown > reader->limits->max_unknown) return GIVE_UP;
            continue;
        }
        if (++reader->spans->groups > reader->limits->max_spans) return GIVE_UP;
        if ((error = read_group(reader, group++, field.data, field.size)) != DONE) return error;
    }
    reader->spans->resource_groups = group;
    return DONE;
}

#include "wire_json.h"

/* ---- what Python calls ---- */

int batchmill_version(void)
{
    return VERSION;
}

/* Once: texts that are in a dictionary already are found by their hash. */
void batchmill_seed(uint64_t first, uint64_t second)
{
    if (secret[0] | secret[1]) return;
    secret[0] = first;
    secret[1] = second;
}

void batchmill_keys_free(Keys *keys)
{
    if (!keys) return;
    dictionary_free(&keys->keys);
    free(keys);
}

/* `text` has the keys, one after the other; `ends` says where each ends. */
Keys *batchmill_keys(const u8 *text, const int32_t *ends, int32_t count)
{
    Keys *keys = malloc(sizeof *keys);
    int32_t i, start = 0;
    if (!keys || count > MOST_COLUMNS) {
        free(keys);
        return NULL;
    }
    dictionary_init(&keys->keys);
    for (i = 0; i < count; i++) {
        if (number_of(&keys->keys, text + start, (size_t)(ends[i] - start)) != i) {
            batchmill_keys_free(keys);
            return NULL;
        }
        start = ends[i];
    }
    return keys;
}

static void column_free(Column *column)
{
    dictionary_free(&column->dictionary);
    free(column->numbers.data);
}

void batchmill_spans_free(Spans *spans)
{
    int i;
    if (!spans) return;
    free(spans->times.data);
    free(spans->ends.data);
    free(spans->trace_ids.data);
    free(spans->span_ids.data);
    free(spans->parent_ids.data);
    free(spans->has_parent.data);
    free(spans->kinds.data);
    free(spans->statuses.data);
    free(spans->group.data);
    column_free(&spans->name);
    for (i = 0; i < spans->column_count; i++) column_free(&spans->columns[i]);
    dictionary_free(&spans->keys);
    dictionary_free(&spans->values);
    free(spans->rest_keys.data);
    free(spans->rest_values.data);
    free(spans->rest_ends.data);
    free(spans->resources.data);
    free(spans->odd.data);
    free(spans);
}

static Spans *new_spans(const Keys *keys)
{
    Spans *spans = calloc(1, sizeof *spans);
    int i;
    if (!spans) return NULL;
    spans->column_count = (int)count_of(&keys->keys);
    for (i = 0; i < spans->column_count; i++) dictionary_init(&spans->columns[i].dictionary);
    dictionary_init(&spans->name.dictionary);
    dictionary_init(&spans->keys);
    dictionary_init(&spans->values);
    return spans;
}

/* Decode a body, in protobuf or JSON; `*out` is to be freed. DONE, GIVE_UP or NO_MEMORY; without
 * DONE there is none. Replacements are in protobuf, whatever the body is. */
int batchmill_decode(const Keys *keys, const Limits *limits, int is_json, const u8 *body,
                     int64_t size, const Replacement *replacements, int64_t replacement_count,
                     Spans **out)
{
    Reader reader = {.keys = keys, .limits = limits, .body = body, .replacements = replacements,
                     .replacement_count = replacement_count, .error = DONE};
    int error;
    *out = NULL;
    reader.event_column = look_up(&keys->keys, (const u8 *)EVENTS, sizeof EVENTS - 1);
    reader.message_column = look_up(&keys->keys, (const u8 *)MESSAGE, sizeof MESSAGE - 1);
    reader.spans = new_spans(keys);
    if (!reader.spans) return NO_MEMORY;
    error = is_json ? json_request(&reader, (size_t)size) : read_request(&reader, (size_t)size);
    free(reader.scratch.data);
    free(reader.events.data);
    if (error != DONE) {
        batchmill_spans_free(reader.spans);
        return error;
    }
    *out = reader.spans;
    return DONE;
}

/* Give back what is spare in an array, or all of it if it is empty. */
static void trim(void **data, size_t *room, size_t length, size_t item)
{
    void *moved;
    if (length == *room) return;
    if (!length) {
        free(*data);
        *data = NULL;
        *room = 0;
        return;
    }
    moved = realloc(*data, length * item);
    if (!moved) return; /* it stays as it was */
    *data = moved;
    *room = length;
}

#define TRIM(array)                                                                                \
    trim((void **)&(array)->data, &(array)->room, (array)->length, sizeof *(array)->data)

/* No more texts are looked up or added after that. */
static void dictionary_trim(Dictionary *dictionary)
{
    free(dictionary->slots);
    dictionary->slots = NULL;
    dictionary->slot_count = 0;
    dictionary->hashes.length = 0;
    TRIM(&dictionary->hashes);
    TRIM(&dictionary->text);
    TRIM(&dictionary->offsets);
}

static void column_trim(Column *column)
{
    dictionary_trim(&column->dictionary);
    TRIM(&column->numbers);
}

/* Give back all that `batchmill_join` does not need: spans may wait for long. The parts of
 * resources and the odd spans are forgotten. */
void batchmill_trim(Spans *spans)
{
    int i;
    spans->resources.length = spans->odd.length = 0;
    TRIM(&spans->resources);
    TRIM(&spans->odd);
    TRIM(&spans->times);
    TRIM(&spans->ends);
    TRIM(&spans->trace_ids);
    TRIM(&spans->span_ids);
    TRIM(&spans->parent_ids);
    TRIM(&spans->has_parent);
    TRIM(&spans->kinds);
    TRIM(&spans->statuses);
    TRIM(&spans->group);
    TRIM(&spans->rest_keys);
    TRIM(&spans->rest_values);
    TRIM(&spans->rest_ends);
    column_trim(&spans->name);
    for (i = 0; i < spans->column_count; i++) column_trim(&spans->columns[i]);
    dictionary_trim(&spans->keys);
    dictionary_trim(&spans->values);
}

typedef struct {
    int64_t rows, groups, attributes, bytes;
    int64_t resource_count, odd_count; /* of numbers: three for each */
    const int64_t *resources, *odd;
} About;

static int64_t dictionary_bytes(const Dictionary *dictionary)
{
    return (int64_t)(dictionary->text.room + 4 * dictionary->offsets.room +
                     4 * dictionary->hashes.room + 4 * dictionary->slot_count);
}

static int64_t column_bytes(const Column *column)
{
    return dictionary_bytes(&column->dictionary) + 4 * (int64_t)column->numbers.room;
}

void batchmill_about(const Spans *spans, About *about)
{
    int i;
    about->rows = (int64_t)spans->times.length;
    about->groups = spans->resource_groups;
    about->attributes = spans->attributes;
    about->resource_count = (int64_t)spans->resources.length;
    about->odd_count = (int64_t)spans->odd.length;
    about->resources = spans->resources.data;
    about->odd = spans->odd.data;
    about->bytes = (int64_t)(sizeof *spans + 8 * (spans->times.room + spans->ends.room) +
                             8 * (spans->resources.room + spans->odd.room) +
                             spans->trace_ids.room + spans->span_ids.room +
                             spans->parent_ids.room + spans->has_parent.room + spans->kinds.room +
                             spans->statuses.room + 4 * spans->group.room +
                             4 * (spans->rest_keys.room + spans->rest_values.room +
                                  spans->rest_ends.room)) +
                   column_bytes(&spans->name) + dictionary_bytes(&spans->keys) +
                   dictionary_bytes(&spans->values);
    for (i = 0; i < spans->column_count; i++) about->bytes += column_bytes(&spans->columns[i]);
}

/* ---- the spans of several requests as one table, in the layout of Arrow ---- */

typedef struct {
    int64_t rows, rest;
    int64_t *times, *ends;
    int32_t *id_offsets[3]; /* of trace, span and parent ids */
    u8 *ids[3];
    u8 *parent_valid; /* bits */
    int64_t parent_nulls;
    int32_t *kinds, *statuses, *group;
    int32_t *rest_offsets, *rest_keys, *rest_values;
    Dictionary keys, values;
    int column_count;
    struct {
        Dictionary dictionary;
        int32_t *numbers; /* NULL: the column has only nulls */
        u8 *valid;        /* bits */
        int64_t nulls;
    } columns[MOST_COLUMNS + 1]; /* the last one is the name */
} Table;

void batchmill_table_free(Table *table)
{
    int i;
    if (!table) return;
    free(table->times);
    free(table->ends);
    for (i = 0; i < 3; i++) {
        free(table->id_offsets[i]);
        free(table->ids[i]);
    }
    free(table->parent_valid);
    free(table->kinds);
    free(table->statuses);
    free(table->group);
    free(table->rest_offsets);
    free(table->rest_keys);
    free(table->rest_values);
    dictionary_free(&table->keys);
    dictionary_free(&table->values);
    for (i = 0; i <= table->column_count; i++) {
        dictionary_free(&table->columns[i].dictionary);
        free(table->columns[i].numbers);
        free(table->columns[i].valid);
    }
    free(table);
}

/* For each text of `from` its number in `into`; NULL without memory. */
static int32_t *numbers_in(Dictionary *into, const Dictionary *from)
{
    size_t count = count_of(from), i;
    int32_t *numbers = malloc((count + 1) * sizeof *numbers);
    if (!numbers) return NULL;
    for (i = 0; i < count; i++) {
        size_t start = (size_t)from->offsets.data[i], end = (size_t)from->offsets.data[i + 1];
        numbers[i] = number_of(into, from->text.data + start, end - start);
        if (numbers[i] < 0) {
            free(numbers);
            return NULL;
        }
    }
    return numbers;
}

static void set_bits(u8 *bits, size_t from, size_t to)
{
    for (; from < to; from++) bits[from >> 3] |= (u8)(1u << (from & 7));
}

static int join_column(Table *table, int index, const Column *column, size_t row, size_t rows)
{
    int32_t *numbers, *out;
    size_t i, total = (size_t)table->rows;
    if (!column->numbers.length) {
        table->columns[index].nulls += (int64_t)rows;
        return 1;
    }
    if (!table->columns[index].numbers) {
        table->columns[index].numbers = calloc(total, sizeof *out);
        table->columns[index].valid = calloc(total / 8 + 1, 1);
        if (!table->columns[index].numbers || !table->columns[index].valid) return 0;
    }
    numbers = numbers_in(&table->columns[index].dictionary, &column->dictionary);
    if (!numbers) return 0;
    out = table->columns[index].numbers + row;
    for (i = 0; i < column->numbers.length; i++) {
        int32_t number = column->numbers.data[i];
        if (number < 0) {
            table->columns[index].nulls++;
        } else {
            out[i] = numbers[number];
            table->columns[index].valid[(row + i) >> 3] |= (u8)(1u << ((row + i) & 7));
        }
    }
    table->columns[index].nulls += (int64_t)(rows - column->numbers.length);
    free(numbers);
    return 1;
}

static int join_rest(Table *table, const Spans *spans, size_t row, size_t rest)
{
    int32_t *keys = numbers_in(&table->keys, &spans->keys);
    int32_t *values = numbers_in(&table->values, &spans->values);
    size_t i;
    if (keys && values) {
        for (i = 0; i < spans->rest_keys.length; i++) {
            table->rest_keys[rest + i] = keys[spans->rest_keys.data[i]];
            table->rest_values[rest + i] = values[spans->rest_values.data[i]];
        }
        for (i = 0; i < spans->times.length; i++)
            table->rest_offsets[row + i + 1] = (int32_t)rest + spans->rest_ends.data[i];
    }
    i = keys && values;
    free(keys);
    free(values);
    return (int)i;
}

static void join_ids(Table *table, const Spans *spans, size_t row)
{
    size_t rows = spans->times.length, i;
    int32_t parents = table->id_offsets[2][row];
    write_hex(table->ids[0] + 32 * row, spans->trace_ids.data, 16 * rows);
    write_hex(table->ids[1] + 16 * row, spans->span_ids.data, 8 * rows);
    write_hex(table->ids[2] + parents, spans->parent_ids.data, spans->parent_ids.length);
    for (i = 0; i < rows; i++) {
        table->id_offsets[0][row + i + 1] = (int32_t)(32 * (row + i + 1));
        table->id_offsets[1][row + i + 1] = (int32_t)(16 * (row + i + 1));
        if (spans->has_parent.data[i]) {
            parents += 16;
            set_bits(table->parent_valid, row + i, row + i + 1);
        } else {
            table->parent_nulls++;
        }
        table->id_offsets[2][row + i + 1] = parents;
        /* 0 is unspecified, which OpenTelemetry defines as INTERNAL. */
        table->kinds[row + i] = spans->kinds.data[i] ? spans->kinds.data[i] - 1 : 0;
        table->statuses[row + i] = spans->statuses.data[i];
    }
}

static int allocate(Table *table, size_t rows, size_t rest)
{
    int i;
    static const size_t WIDTHS[3] = {32, 16, 16};
    table->rows = (int64_t)rows;
    table->rest = (int64_t)rest;
    table->times = malloc(8 * rows + 8);
    table->ends = malloc(8 * rows + 8);
    table->parent_valid = calloc(rows / 8 + 1, 1);
    table->kinds = malloc(4 * rows + 4);
    table->statuses = malloc(4 * rows + 4);
    table->group = malloc(4 * rows + 4);
    table->rest_offsets = malloc(4 * rows + 4);
    table->rest_keys = malloc(4 * rest + 4);
    table->rest_values = malloc(4 * rest + 4);
    for (i = 0; i < 3; i++) {
        table->id_offsets[i] = malloc(4 * rows + 4);
        table->ids[i] = malloc(WIDTHS[i] * rows + 1);
        if (!table->id_offsets[i] || !table->ids[i]) return 0;
        table->id_offsets[i][0] = 0;
    }
    if (!table->times || !table->ends || !table->parent_valid || !table->kinds ||
        !table->statuses || !table->group || !table->rest_offsets || !table->rest_keys ||
        !table->rest_values)
        return 0;
    table->rest_offsets[0] = 0;
    return 1;
}

static int join(Table *table, const Spans *const *parts, int64_t count, const int32_t *resources,
                const int64_t *firsts)
{
    size_t row = 0, rest = 0, rows, i;
    int64_t part;
    int column;
    for (part = 0; part < count; part++) {
        const Spans *spans = parts[part];
        rows = spans->times.length;
        if (!rows) continue;
        memcpy(table->times + row, spans->times.data, 8 * rows);
        memcpy(table->ends + row, spans->ends.data, 8 * rows);
        join_ids(table, spans, row);
        for (i = 0; i < rows; i++)
            table->group[row + i] = resources[firsts[part] + spans->group.data[i]];
        for (column = 0; column < table->column_count; column++)
            if (!join_column(table, column, &spans->columns[column], row, rows)) return 0;
        if (!join_column(table, column, &spans->name, row, rows)) return 0;
        if (!join_rest(table, spans, row, rest)) return 0;
        row += rows;
        rest += spans->rest_keys.length;
    }
    return 1;
}

/* Join the rows of `parts`; `*out` is to be freed. The resource of a row is the number that
 * `resources` has for its group, where those of a part begin at its entry in `firsts`. */
int batchmill_join(const Spans *const *parts, int64_t count, const int32_t *resources,
                   const int64_t *firsts, Table **out)
{
    size_t rows = 0, rest = 0;
    int64_t part;
    int i;
    Table *table = calloc(1, sizeof *table);
    *out = NULL;
    if (!table) return NO_MEMORY;
    table->column_count = count ? parts[0]->column_count : 0;
    for (i = 0; i <= table->column_count; i++) dictionary_init(&table->columns[i].dictionary);
    dictionary_init(&table->keys);
    dictionary_init(&table->values);
    for (part = 0; part < count; part++) {
        rows += parts[part]->times.length;
        rest += parts[part]->rest_keys.length;
    }
    if (rows > INT32_MAX / 32 || rest > INT32_MAX || !allocate(table, rows, rest) ||
        !join(table, parts, count, resources, firsts)) {
        batchmill_table_free(table);
        return NO_MEMORY;
    }
    *out = table;
    return DONE;
}

/* A column of a table: numbers of texts, with the texts; or plain values, without. */
typedef struct {
    int64_t length, nulls, distinct, text_bytes;
    const void *numbers, *valid;
    const int32_t *offsets;
    const u8 *text;
} View;

static void view_texts(View *view, const Dictionary *dictionary)
{
    view->distinct = (int64_t)count_of(dictionary);
    view->offsets = dictionary->offsets.data;
    view->text = dictionary->text.data;
    view->text_bytes = (int64_t)dictionary->text.length;
}

enum { TIME = -20, END_TIME, TRACE_ID, SPAN_ID, PARENT_ID, KIND, STATUS, RESOURCE, REST_OFFSETS,
       REST_KEYS, REST_VALUES };

/* Describe a column: 0 or more is that of an attribute, the one after the last the name. */
int batchmill_view(const Table *table, int column, View *view)
{
    memset(view, 0, sizeof *view);
    view->length = table->rows;
    if (column >= 0 && column <= table->column_count) {
        view->numbers = table->columns[column].numbers;
        view->valid = table->columns[column].valid;
        view->nulls = table->columns[column].nulls;
        view_texts(view, &table->columns[column].dictionary);
        return DONE;
    }
    switch (column) {
    case TIME: view->numbers = table->times; return DONE;
    case END_TIME: view->numbers = table->ends; return DONE;
    case TRACE_ID:
    case SPAN_ID:
    case PARENT_ID:
        view->offsets = table->id_offsets[column - TRACE_ID];
        view->text = table->ids[column - TRACE_ID];
        view->text_bytes = view->offsets[table->rows];
        if (column == PARENT_ID) {
            view->valid = table->parent_valid;
            view->nulls = table->parent_nulls;
        }
        return DONE;
    case KIND: view->numbers = table->kinds; return DONE;
    case STATUS: view->numbers = table->statuses; return DONE;
    case RESOURCE: view->numbers = table->group; return DONE;
    case REST_OFFSETS:
        view->numbers = table->rest_offsets;
        view->length = table->rows + 1;
        return DONE;
    case REST_KEYS:
    case REST_VALUES:
        view->numbers = column == REST_KEYS ? table->rest_keys : table->rest_values;
        view->length = table->rest;
        view_texts(view, column == REST_KEYS ? &table->keys : &table->values);
        return DONE;
    }
    return GIVE_UP;
}
