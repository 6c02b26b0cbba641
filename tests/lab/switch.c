/* A network switch as a process, for kernels without netem: every link has a delay, and a rate each way.
 *
 *     switch DELAY_US MBIT PID...
 *
 * Makes "eth0" in the network of each of these processes, prints "ready" and forwards frames until it is killed
 * or who started it has gone. A frame leaves its host when those before it have left, is DELAY_US on its way, and comes in when what came in
 * before has: what many hosts send to one waits, and is dropped beyond QUEUE_BYTES.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PORTS = 128, FRAME_BYTES = 70000, OFFLOAD_BYTES = 10, MAC_BYTES = 6, BATCH = 16, QUEUE_BYTES = 32 << 20 };

struct frame { struct frame *next; int64_t due_ns; int target, bytes; char data[]; };
struct queue { struct frame *first, *last; int64_t bytes; };
struct port { int file; char mac[MAC_BYTES]; int64_t leaves_ns, comes_ns; struct queue leaving, coming; };

static struct port ports[MOST_PORTS];
static struct pollfd polls[MOST_PORTS];
static int num_ports;
static int64_t delay_ns;
static double byte_ns;

static void fail(const char *what) { perror(what); exit(1); }

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int64_t later(int64_t one, int64_t other) { return one > other ? one : other; }

static int add_port(const char *process) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", process);
    int network = open(path, O_RDONLY), file;
    if (network < 0 || setns(network, CLONE_NEWNET)) fail(path);
    close(network);
    struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int offload = OFFLOAD_BYTES;
    file = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (file < 0 || ioctl(file, TUNSETIFF, &request) || ioctl(file, TUNSETVNETHDRSZ, &offload)
        || ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) fail("/dev/net/tun");
    return file;
}

static void append(struct queue *queue, struct frame *frame) {
    if (queue->bytes + frame->bytes > QUEUE_BYTES) { free(frame); return; }
    frame->next = NULL;
    if (queue->first) queue->last->next = frame; else queue->first = frame;
    queue->last = frame;
    queue->bytes += frame->bytes;
}

static struct frame *due(struct queue *queue, int64_t now) {
    struct frame *frame = queue->first;
    if (!frame || frame->due_ns > now) return NULL;
    queue->first = frame->next;
    queue->bytes -= frame->bytes;
    return frame;
}

static void send_to(int target, struct port *from, const char *data, int bytes, int64_t due_ns) {
    struct frame *frame = malloc(sizeof *frame + bytes);
    if (!frame) fail("frame");
    *frame = (struct frame){.due_ns = due_ns, .target = target, .bytes = bytes};
    memcpy(frame->data, data, bytes);
    append(&from->leaving, frame);
}

/* To the port whose address it is; to all others where nobody is known to have it. */
static void take_in(int source) {
    static char data[FRAME_BYTES];
    struct port *from = &ports[source];
    const char *header = data + OFFLOAD_BYTES;
    for (int number = 0; number < BATCH; number++) {
        int bytes = read(from->file, data, sizeof data), target = -1;
        if (bytes < OFFLOAD_BYTES + 2 * MAC_BYTES) return;
        memcpy(from->mac, header + MAC_BYTES, MAC_BYTES);
        int64_t begins = later(now_ns(), from->leaves_ns);
        from->leaves_ns = begins + bytes * byte_ns;
        for (int port = 0; port < num_ports; port++) if (!memcmp(header, ports[port].mac, MAC_BYTES)) target = port;
        for (int port = 0; port < num_ports; port++)
            if (port != source && (target < 0 || port == target)) send_to(port, from, data, bytes, begins + delay_ns);
    }
}

/* Its first byte comes in when its first byte has left: a frame's time on the link counts once. */
static int64_t move_on(int64_t now) {
    struct frame *frame;
    int64_t next = INT64_MAX;
    for (int port = 0; port < num_ports; port++)
        while ((frame = due(&ports[port].leaving, now))) {
            struct port *to = &ports[frame->target];
            frame->due_ns = to->comes_ns = later(frame->due_ns, to->comes_ns) + frame->bytes * byte_ns;
            append(&to->coming, frame);
        }
    for (struct port *port = ports; port < ports + num_ports; port++) {
        while ((frame = due(&port->coming, now))) {
            if (write(port->file, frame->data, frame->bytes) < 0) { /* a host that has gone hears nothing */ }
            free(frame);
        }
        if (port->coming.first && port->coming.first->due_ns < next) next = port->coming.first->due_ns;
        if (port->leaving.first && port->leaving.first->due_ns < next) next = port->leaving.first->due_ns;
    }
    return next;
}

int main(int count, char **words) {
    if (count < 4 || count - 3 > MOST_PORTS) return 2;
    delay_ns = 1000 * atoll(words[1]);
    byte_ns = 8000.0 / atof(words[2]);
    for (; num_ports < count - 3; num_ports++)
        polls[num_ports] = (struct pollfd){.fd = ports[num_ports].file = add_port(words[num_ports + 3]), .events = POLLIN};
    /* Before all ranks: a switch that waits for its turn on a core is another network. */
    struct sched_param first = {.sched_priority = 50};
    if (sched_setscheduler(0, SCHED_FIFO, &first) || prctl(PR_SET_TIMERSLACK, 1UL)) fail("priority");
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("signal");
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = move_on(now_ns()), left = later(0, next - now_ns());
        struct timespec wait = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        if (ppoll(polls, num_ports, next == INT64_MAX ? NULL : &wait, NULL) < 0) fail("poll");
        for (int port = 0; port < num_ports; port++) {
            if (polls[port].revents & POLLIN) take_in(port);
            if (polls[port].revents & POLLERR) polls[port].fd = -1; /* the host has gone */
        }
    }
}
